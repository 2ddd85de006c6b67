# Every target works on a fresh clone: it makes .venv first if need be (python3 with venv is enough).

PYTHON ?= python3
SEEDS ?= 1000
RUNS ?= 100000
CLIENTS := c_client cpp_client go_client node_client rust_client
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: demo test twins sanitize aarch64 training operators check wheel bench targets must performance floods keeping sim fuzz explore build $(CLIENTS) clients conformance compose-test bench-clients clean

demo: $(STAMP)
	$(BIN)/weightbus demo --seconds 30 --plot demo.png

test: $(STAMP)
	$(BIN)/pytest

# The tests of what touches bytes once more, without the helper in C.
twins: $(STAMP)
	$(BIN)/python tests/twins.py

# What is in C, under AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: $(STAMP)
	$(BIN)/python tests/sanitize.py

# The checksums in C as they are on ARM, in an emulator.
aarch64:
	mkdir -p build
	aarch64-linux-gnu-gcc -O2 -static -Wall -Wextra -Werror -pthread tests/native/crc32c_checks.c -o build/crc32c_checks
	qemu-aarch64-static -cpu max build/crc32c_checks

# Callbacks in the trainers of others, whose own warnings are theirs.
training: $(STAMP)
	$(BIN)/pytest -W default tests/training

# What operators see, with the real Prometheus and a browser (Debian: prometheus chromium).
operators: $(STAMP)
	$(BIN)/pytest tests/operators

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pyright

bench: $(STAMP)
	$(BIN)/python benchmarks/bench.py

targets: $(STAMP)
	$(BIN)/python benchmarks/targets.py

# What must be kept, and nothing else.
must: $(STAMP)
	$(BIN)/python benchmarks/targets.py --must

# What docs/PERFORMANCE.md shows, anew, on a quiet machine. Missed targets are shown as well.
performance: $(STAMP)
	mkdir -p .performance
	$(BIN)/python benchmarks/bench.py --json .performance/bench.json --plots docs
	-$(BIN)/python benchmarks/targets.py --bench .performance/bench.json --json .performance/targets.json
	$(BIN)/python benchmarks/page.py .performance/bench.json .performance/targets.json

# What floods of every kind cost a publisher and its honest workers: six minutes, on a quiet machine.
floods: $(STAMP)
	$(BIN)/python benchmarks/floods.py

# What a state folder costs a publish: eight minutes, on a quiet machine.
keeping: $(STAMP)
	$(BIN)/python benchmarks/keeping.py

sim: $(STAMP)
	$(BIN)/python tests/simulate.py --seeds $(SEEDS)

# Every state of small worlds, in which messages are lost and processes killed: minutes, on all cores.
explore: $(STAMP)
	$(BIN)/python tests/explore.py

# Whatever takes bytes of others, guided by coverage. atheris is for Linux, and large: fetched here.
fuzz: $(STAMP)
	$(BIN)/pip install --quiet 'atheris>=3'
	$(BIN)/python tests/fuzz.py --runs $(RUNS)

# What other targets build when they need it, side by side: make -j2 build
build: $(STAMP) $(CLIENTS)

$(CLIENTS):
	$(MAKE) -C $@ driver

# The checks and tests of every client in another language, and a short fuzz.
clients: $(STAMP)
	set -e; for client in $(CLIENTS); do $(MAKE) -C $$client check test; $(MAKE) -C $$client fuzz SECONDS=5; done

# Every client in every language: golden vectors, and live scenarios. Writes docs/CONFORMANCE.md.
conformance: $(STAMP)
	$(BIN)/python tests/conformance/run.py --keep-going

# The demo of docker-compose.yml, broken and mended; with an engine of its own if need be (root, Debian).
compose-test: $(STAMP)
	$(BIN)/python tests/compose/run.py

# The wheel, in an environment of its own: every module is in it, and the demo runs.
wheel: $(STAMP)
	$(BIN)/python tests/wheel.py

# How fast each client receives; AGAINST names another checkout, built, whose Python is 1.00.
bench-clients: $(STAMP)
	$(BIN)/python benchmarks/clients.py $(if $(AGAINST),--against $(AGAINST))

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage demo.png

$(STAMP): pyproject.toml constraints.txt codecs/_native.c codecs/_crc32c.h codecs/_delta.c codecs/_delta_scan.h
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)
