# Every target works on a fresh clone: it makes .venv first if need be (python3 with venv is enough).

PYTHON ?= python3
SEEDS ?= 1000
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: demo test check bench targets sim clean

demo: $(STAMP)
	$(BIN)/weightbus demo --seconds 30 --plot demo.png

test: $(STAMP)
	$(BIN)/pytest

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pyright

bench: $(STAMP)
	$(BIN)/python benchmarks/bench.py

targets: $(STAMP)
	$(BIN)/python benchmarks/targets.py

sim: $(STAMP)
	$(BIN)/python tests/simulate.py --seeds $(SEEDS)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage demo.png

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)
