# Every target works on a fresh clone: it makes .venv first if need be (python3 with venv is enough).

PYTHON ?= python3
SEEDS ?= 1000
TREES ?= 200
FIRST ?= 0
RUNS ?= 100000
COUNT ?= 100000
ROUNDS ?= 100
PUBLISHER ?= python
RELAY ?=
SOURCES ?=
LANGUAGES ?=
SCENARIOS ?=
VLLM ?=
SMALL ?= 200000
LARGE ?= 2000
CLIENTS := rust_client go_client c_client cpp_client java_client node_client
BIN := .venv/bin
STAMP := .venv/installed
TRL := .venv-trl/installed
DEMO := .venv/demo-installed
INSTALLED := pyproject.toml setup.py constraints.txt codecs/_native.c codecs/_crc32c.h codecs/_delta.c codecs/_delta_scan.h

.PHONY: demo demo-llm recording test ranks benchmark-test twins sanitize aarch64 training serving serving-short serving-vllm serving-real operators pictures examples check site protocol protocol-transcripts version release packages wheel bench targets must performance floods first-bytes scale sharded sim fuzz explore chaos soak build $(CLIENTS) clients $(CLIENTS:=-tested) conformance compose-test bench-clients clean

demo: $(DEMO)
	$(BIN)/weightbus demo --seconds 30 --plot demo.png

# A tiny language model learns by reinforcement; one of its three workers is in TypeScript.
demo-llm: $(DEMO)
	$(MAKE) -C node_client worker
	$(BIN)/weightbus demo --model llm --seconds 150 --plot demo-llm.png

# What the README shows of a real run of the demo.
recording: $(STAMP)
	$(BIN)/python docs/recording.py docs/demo.svg

# Four at a time on two cores: many wait for processes of their own, or for a deadline.
test: $(STAMP)
	$(BIN)/pytest --numprocesses 4 --dist worksteal -m 'not ranks'

# What several ranks of a trainer do together, each test with processes of its own.
ranks: $(STAMP)
	$(BIN)/pytest --numprocesses 2 --dist worksteal -m ranks tests

# That benchmarks measure what they say, each with all of its processes: minutes.
benchmark-test: $(STAMP)
	$(BIN)/pytest --numprocesses 2 --dist worksteal tests/benchmarks/whole

# The tests of what copies, encodes and compares bytes once more, without the helper in C; and of all of it together.
twins: $(STAMP)
	WEIGHTBUS_NATIVE=0 $(BIN)/pytest --numprocesses 4 --dist worksteal tests/codecs tests/memory tests/client/test_bus.py \
	    tests/client/test_targets.py tests/protocol/test_delta_vectors.py tests/protocol/test_vectors.py

# What is in C, under AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: $(STAMP)
	$(BIN)/python tests/repository/sanitize.py

# The checksums in C as they are on ARM, in an emulator.
aarch64:
	mkdir -p build
	aarch64-linux-gnu-gcc -O2 -static -Wall -Wextra -Werror -pthread tests/repository/crc32c_checks.c -o build/crc32c_checks
	qemu-aarch64-static -cpu max build/crc32c_checks

# In the trainers and collectors of others, which take long to start, and whose own warnings are theirs.
training: $(STAMP)
	$(BIN)/pytest -W default --numprocesses 2 --dist loadfile tests/training

# Where models are served, and trained with reinforcement: with TRL and PEFT, in an environment of its own.
serving: $(TRL) serving-vllm serving-real
	.venv-trl/bin/pytest -W default tests/serving/trl

# Of that, what a change is held to (.ci/run): the oldest and the newest vLLM, no ranks that fail in them, and no server.
serving-short: $(TRL) $(STAMP)
	$(BIN)/python tests/serving/vllm/run.py --short
	$(BIN)/python tests/serving/real/run.py --short
	.venv-trl/bin/pytest -W default tests/serving/trl

# In real vLLMs, of which only the Python is fetched, into .serving: what the engine does in them without a GPU.
serving-vllm: $(STAMP)
	$(BIN)/python tests/serving/vllm/run.py $(VLLM)

# In vLLMs that really run, on this processor: an LLM, and all processes of a server, with a small model.
serving-real: $(STAMP)
	$(BIN)/python tests/serving/real/run.py $(VLLM)

# What operators see, with the real Prometheus and a browser (Debian: prometheus chromium).
operators: $(STAMP)
	$(BIN)/pytest tests/operators

# Pictures of what operators see, for docs/guides/operating.md, of a bus in which not all is well.
pictures: $(STAMP)
	$(BIN)/python tests/operators/pictures.py

# Examples in other languages, each beside a publisher: ONNX Runtime in Node, Eigen, a sidecar in Go, plain Rust.
examples: $(STAMP)
	$(BIN)/pytest tests/languages

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pyright

# The documentation as pages, of which none has a link that leads nowhere; and what a forge reads of ours.
site: $(STAMP)
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet --jobs 2 --conf-dir docs --doctree-dir build/doctrees . build/site
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

# What is made from the description of the protocol, protocol/: code in four languages, tables, the schema.
protocol: $(STAMP)
	$(BIN)/python -m weightbus.protocol

# The sessions that the pages of the protocol show.
protocol-transcripts: $(STAMP)
	$(BIN)/python tests/vectors/transcripts.py

# The version that pyproject.toml says, wherever else it stands.
version:
	$(PYTHON) .ci/versions.py

# Every package, in dist/, and what would be uploaded where. Nothing is.
release: $(STAMP)
	$(BIN)/pip install --quiet -c constraints.txt 'build>=1' 'twine>=6'
	$(BIN)/python .ci/release.py

# Each of these packages in a clean folder, with nothing of this checkout, where its README's example runs. What cargo
# has packed is built there, once.
packages: export VERIFY := --no-verify
packages: release
	$(BIN)/python tests/repository/packages.py

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

# What floods of every kind cost a publisher and its honest workers: twice a quarter of an hour, on a quiet machine.
floods: $(STAMP)
	$(BIN)/python benchmarks/floods.py --publisher $(PUBLISHER)
	$(BIN)/python benchmarks/floods.py --publisher $(PUBLISHER) --keys

# What no worker says, to publishers over tcp and ipc, with and without keys: some minutes.
first-bytes: $(STAMP)
	$(BIN)/python tests/faults/first_bytes.py --count $(COUNT) --publisher $(PUBLISHER)

# Trees of relays over shaped links: in network namespaces as root, else with proxies.
scale: $(STAMP)
	$(BIN)/python benchmarks/scale.py

# Sharded trainers over shaped links, in network namespaces: as root.
sharded: $(STAMP)
	$(BIN)/python benchmarks/sharded.py

sim: $(STAMP)
	$(BIN)/python tests/simulation/simulate.py --seeds $(SEEDS) --first $(FIRST)
	$(BIN)/python tests/simulation/simulate.py --trees --seeds $(TREES) --first $(FIRST)
	$(BIN)/python tests/simulation/scale.py

# Every state of small worlds, in which messages are lost and processes killed: minutes, on all cores.
explore: $(STAMP)
	$(BIN)/python tests/exploring/explore.py

# Whatever takes bytes of others, guided by coverage. atheris is for Linux, and large: fetched here.
fuzz: $(STAMP)
	$(BIN)/pip install --quiet 'atheris>=3'
	$(BIN)/python tests/fuzzing/fuzz.py --runs $(RUNS)

# Real processes of all languages, killed, stopped, cut off and starved; with keys in every second round.
# With RELAY=1, there are relays on the way.
chaos: $(STAMP)
	$(BIN)/python tests/chaos/run.py --rounds $(ROUNDS) --publisher $(PUBLISHER) $(if $(RELAY),--relay) $(if $(SOURCES),--sources)

# A publisher with keys that publishes again and again, while workers come and go: half an hour.
soak: $(STAMP)
	$(BIN)/python tests/chaos/soak.py --small $(SMALL) --large $(LARGE)

# What other targets build when they need it, side by side: make -j2 build
build: $(STAMP) $(CLIENTS)

$(CLIENTS):
	$(MAKE) -C $@ driver

# The checks and tests of every client in another language, and a short fuzz; side by side: make -j2 --output-sync clients
clients: $(CLIENTS:=-tested)

$(CLIENTS:=-tested): $(STAMP)
	$(MAKE) -j1 -C $(@:-tested=) check test
	$(MAKE) -j1 -C $(@:-tested=) fuzz SECONDS=5

# Every client in every language: golden vectors, and live scenarios. Writes docs/CONFORMANCE.md.
# With RELAY=1, only the scenarios, with a relay between publisher and worker. LANGUAGES=python,rust and
# SCENARIOS='patched*,lost-chunks': only these.
conformance: $(STAMP)
	$(BIN)/python tests/conformance/run.py --keep-going $(if $(RELAY),--relay) \
		$(if $(LANGUAGES),--languages $(LANGUAGES)) $(if $(SCENARIOS),--scenarios '$(SCENARIOS)')

# The demo of docker-compose.yml, broken and mended; with an engine of its own if need be (root, Debian).
compose-test: $(STAMP)
	$(BIN)/python tests/compose/run.py

# The wheel, in an environment of its own: every module is in it, and the demo runs.
wheel: $(STAMP)
	$(BIN)/python tests/repository/wheel.py

# How fast each client receives; AGAINST names another checkout, built, whose Python is 1.00.
bench-clients: $(STAMP)
	$(BIN)/python benchmarks/clients.py $(if $(AGAINST),--against $(AGAINST))

clean:
	rm -rf .venv .venv-trl build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage demo.png demo-llm.png

# pip shows what it does: the first time it takes minutes.
$(STAMP): $(INSTALLED)
	$(PYTHON) -m venv .venv
	@echo "Installing weightbus and all that its tests and checks need into .venv: the first time this takes minutes."
	$(BIN)/pip install -c constraints.txt -e '.[dev]'
	touch $(DEMO) $(STAMP)

# The demo needs less: torch, gymnasium, matplotlib.
$(DEMO): $(INSTALLED)
	$(PYTHON) -m venv .venv
	@echo "Installing weightbus and what the demo needs (torch, gymnasium, matplotlib) into .venv."
	$(BIN)/pip install -c constraints.txt -e '.[demo]'
	touch $(DEMO)

$(TRL): $(INSTALLED)
	$(PYTHON) -m venv .venv-trl
	@echo "Installing weightbus and TRL into .venv-trl."
	.venv-trl/bin/pip install -c constraints.txt -e '.[trl]' hypothesis peft pytest pytest-timeout
	touch $(TRL)
