# Development and deployment tasks, from a bare machine: each target first installs what it needs (a virtual
# environment in .venv, from a lock file).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
EXTRA ?= cpu
FILE ?=
PORT ?=
ARGS ?=
TRACE ?=
BASE ?=
AZURE ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
UV_VERSION := 0.13.8
CONSOLE := platform/kvasir_platform/gateway/console
CONSOLE_BUILD := build/console
CONSOLE_SOURCES := $(wildcard $(CONSOLE)/web/* $(CONSOLE)/web/.npmrc $(CONSOLE)/web/src/* $(CONSOLE)/web/src/*/*)
# What setup.py compiles; a change of it is in use only when it is compiled again.
COMPILED := platform/kvasir/compiled.txt
SOURCES := pyproject.toml setup.py $(wildcard platform/kvasir/native/src/*.* platform/kvasir/native/src/*/*) $(wildcard platform/kvasir/core/figures/*.?pp) workers/kvasir_workers/engines/signing/signed_tcp.c $(COMPILED) $(wildcard $(shell cat $(COMPILED)))
# Tests that start no engine wait for a third of their time, for sockets and processes: three processes keep two
# cores busy. Each file stays in one process. In the order of folders, the last files are short ones; in that of the
# number of tests, which is the default, some of the longest would be.
FAST := -n 3 --dist loadfile --no-loadscope-reorder
# Tests that share an engine or a deployment stay in one process, the longest groups first (tests/kit/suite/schedule.py).
SLOW := -n 2 --dist loadgroup --no-loadscope-reorder
# What fails in one part is named at the end of the other as well. Without `=`, pytest takes a file that exists for
# one of tests.
FAILURES := build/test-failures.txt
UP_ARGS := $(if $(FILE),-f $(FILE)) $(if $(PORT),--port $(PORT)) $(ARGS)

.PHONY: help install install-dev up down status test test-fast soak lint types arch fmt proto pages console console-check lock sbom \
	bench-foundation bench-edge bench-edge-link bench-tokenizing bench-bounds bench-gateway bench-instructions bench-index bench-policies bench-eviction bench-kv bench-parity bench-overlap bench-threads bench-cluster bench-autoscale bench-regions bench-sim bench-models bench-truth bench-scaling bench-paired bench-agreement bench-alerts frameworks-check images-check cluster-checks scorecard reports clean

help: ## list the targets
	@echo "Kvasir. First: make up"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-18s %s\n", $$1, $$2 }'
	@echo "Variables: FILE=kvasir.yaml PORT=8000 ARGS='--set …' (up), EXTRA=gpu (up, install), PYTHON=python3.12"

$(BIN)/python:
	@echo "==> $(VENV): a virtual environment with $$($(PYTHON) --version 2>&1 || echo 'no $(PYTHON)')"
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is not installed; Kvasir needs Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $$($(PYTHON) --version) is too old: Kvasir needs Python 3.11 or newer; name one with PYTHON=python3.12" >&2; exit 1; }
	@[ "$$(uname -s)" = Linux ] || { echo "error: $$(uname -s) is not supported: the engine's wheels are for Linux; use a container or a virtual machine" >&2; exit 1; }
	@case "$$(uname -m)" in x86_64|aarch64) ;; *) echo "error: no engine wheels exist for $$(uname -m)" >&2; exit 1 ;; esac
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "error: $(PYTHON) cannot make virtual environments: apt install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# A stamp per lock file: a second call does nothing until the lock or the build changes.
# pip compiles with one core; packages ship files of other versions of Python, which do not compile.
$(VENV)/.installed-%: requirements/%.lock requirements/build.lock $(SOURCES) | $(BIN)/python
	@echo "==> packages of requirements/$*.lock ($$(grep -c '^[a-z].*==' $<) pinned; the first time takes a minute or more)"
	@$(PIP) install -qq --progress-bar off --no-compile --no-deps --require-hashes -r $< -r requirements/build.lock || { echo "error: pip could not install requirements/$*.lock (above: why). If it found no torch==…+cpu, name PyTorch's wheel index for the CPU in PIP_EXTRA_INDEX_URL and run again" >&2; exit 1; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || echo "    no C++ compiler: the native code runs as Python, which is slower (apt install g++)"
	@echo "==> bytecode of the packages, on all cores"
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@echo "==> kvasir itself, editable; its native code is built in two to three minutes"
	@$(PIP) install -qq --no-deps --no-build-isolation -e .
	@touch $@
	@if [ "$*" = dev ]; then touch $(VENV)/.installed-cpu; fi

install: $(VENV)/.installed-$(EXTRA) ## create .venv and install what `make up` needs (EXTRA=gpu on a GPU machine)
	@:

install-dev: $(VENV)/.installed-dev ## install, plus what tests and checks need
	@:

up: install ## start the platform on this machine; Ctrl-C stops it
	@exec $(BIN)/kvasir up $(UP_ARGS)

down: ## stop the platform from another terminal, and clean up after a crash
	@if [ -x $(BIN)/kvasir ]; then exec $(BIN)/kvasir down; else echo "nothing is installed, so nothing runs"; fi

status: ## show workers, load and processes
	@if [ -x $(BIN)/kvasir ]; then exec $(BIN)/kvasir status; else echo "nothing is installed, so nothing runs"; fi

# Hundreds of processes import the code: their bytecode is kept, whatever the environment says.
test test-fast soak: export PYTHONDONTWRITEBYTECODE :=

test: install-dev ## run all tests, including those with real engines (minutes); ARGS="tests/unit/wire" runs some
ifneq ($(ARGS),)
	@$(BIN)/python -m pytest $(ARGS)
else
	@failed=0; \
	rm -f $(FAILURES); \
	$(BIN)/python -m pytest -m "not slow" $(FAST) --failures=$(FAILURES) || failed=$$?; \
	$(BIN)/python -m pytest -m slow $(SLOW) --failures=$(FAILURES) || failed=$$?; \
	exit $$failed
endif

test-fast: install-dev ## run the tests that start no engine (a minute or two)
	@$(BIN)/python -m pytest -m "not slow" $(FAST) $(ARGS)

soak: install-dev ## run the nightly job: full matrices, many seeds and histories, the scorecard (hours)
	@failed=0; \
	$(BIN)/python -m pytest --soak --timeout=3600 $(ARGS) || failed=$$?; \
	$(BIN)/python -m load_tests.scenarios.scorecard || failed=$$?; \
	exit $$failed

lint: install-dev ## check rules and format with ruff
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: install-dev ## check types with mypy --strict
	@$(BIN)/mypy

arch: install-dev ## check import layers with import-linter
	@$(BIN)/lint-imports

fmt: install-dev ## format, and apply ruff's fixes
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

proto: install-dev ## generate the wire code from proto/
	@$(BIN)/python proto/generate.py

pages: install-dev ## generate the parts of docs/ that come from the code
	@$(BIN)/kvasir config schema > docs/kvasir.schema.json
	@page=$$($(BIN)/python -m kvasir.telemetry.reasons < docs/errors.md) && printf '%s\n' "$$page" > docs/errors.md
	@$(BIN)/python -m kvasir_platform.gateway.openapi.document > docs/openapi.json
	@$(BIN)/python -m kvasir.telemetry.reference > docs/METRICS.md
	@$(BIN)/python -m kvasir_platform.dashboards.files helm/kvasir/files/dashboards
	@$(BIN)/python helm/values_pages.py

console: $(CONSOLE_BUILD)/.installed ## build the web console from its sources (needs node 20 and npm)
	@cd $(CONSOLE_BUILD) && npm run --silent build -- --logLevel warn --outDir $(CURDIR)/$(CONSOLE)/site

console-check: $(CONSOLE_BUILD)/.installed ## check that the committed web console is a build of its sources
	@cd $(CONSOLE_BUILD) && npm run --silent build -- --logLevel warn --outDir dist
	@diff -r $(CONSOLE_BUILD)/dist $(CONSOLE)/site || { echo "error: the console was not built from these sources: run make console" >&2; exit 1; }

# Beside the sources, npm's folder would be searched by every check of the tree.
$(CONSOLE_BUILD)/.installed: $(CONSOLE_SOURCES)
	@command -v npm >/dev/null || { echo "error: npm is not installed; building the console needs node 20 and npm" >&2; exit 1; }
	@mkdir -p $(CONSOLE_BUILD)
	@find $(CONSOLE_BUILD) -mindepth 1 -maxdepth 1 ! -name node_modules -exec rm -rf {} +
	@cp -r $(CONSOLE)/web/. $(CONSOLE_BUILD)/
	@cd $(CONSOLE_BUILD) && npm ci --silent
	@touch $@

sbom: ## print the installed packages as CycloneDX (EXTRA=cpu, gpu or base)
	@$(PYTHON) requirements/sbom.py $(EXTRA)

lock: $(BIN)/python ## resolve the lock files from requirements/*.in (needs the network)
	@$(PIP) install -qq uv==$(UV_VERSION)
	@requirements/lock.sh

bench-foundation: install-dev ## measure start, memory, TTFT and throughput into load_tests/reports
	@$(BIN)/python -m load_tests.scenarios.foundation $(if $(BARE),--bare) $(ARGS)

bench-edge: install-dev ## measure the HTTP edge alone, in front of a scripted router
	@$(BIN)/python -m load_tests.scenarios.edge

bench-edge-link: install-dev ## measure the overhead of an edge process over a single process
	@$(BIN)/python -m load_tests.scenarios.edge_link

bench-tokenizing: install-dev ## measure tokenization of prompts, with a full-size vocabulary
	@$(BIN)/python -m load_tests.scenarios.tokenizing

bench-bounds: install-dev ## measure the costliest bodies, and masks of patterns that are accepted and refused
	@$(BIN)/python -m load_tests.scenarios.gateway.bounds

bench-gateway: install-dev ## measure the whole gateway path, compared with proxies and other routers (minutes)
	@$(BIN)/python -m load_tests.scenarios.gateway $(ARGS)

bench-index: install-dev ## measure the prefix index and the decision, compared with Dynamo's index
	@$(BIN)/python -m load_tests.scenarios.index $(ARGS)

bench-kv: install-dev ## measure KV transfer between workers and to the tiers, against the machine's limits (minutes)
	@$(BIN)/python -m load_tests.scenarios.kv $(ARGS)

bench-parity: install-dev ## compare predicted prefix hits with those that real engines report
	@$(BIN)/python -m load_tests.scenarios.parity $(ARGS)

bench-overlap: install-dev ## measure the gain of pulling a prompt's KV while it is computed
	@$(BIN)/python -m load_tests.scenarios.overlap $(ARGS)

bench-policies: install-dev ## play a trace (TRACE=…) through every routing policy, in virtual time (minutes)
	@test -n "$(TRACE)" || { echo "error: name the trace: make bench-policies TRACE=mooncake_conversation.jsonl" >&2; exit 2; }
	@$(BIN)/python -m load_tests.scenarios.policies $(TRACE) $(if $(AZURE),--azure $(AZURE)) $(ARGS)

bench-eviction: install-dev ## play a trace (TRACE=…) through every eviction policy of the tiers (minutes)
	@test -n "$(TRACE)" || { echo "error: name the trace: make bench-eviction TRACE=mooncake_conversation.jsonl" >&2; exit 2; }
	@$(BIN)/python -m load_tests.scenarios.eviction $(TRACE) $(ARGS)

bench-sim: install-dev ## measure the simulator's speed, exact replays, and policies beside a bound (minutes)
	@$(BIN)/python -m load_tests.scenarios.simulator $(ARGS)

bench-threads: install-dev ## measure ITL of two engines on two CPUs by how their threads wait (minutes, on an idle machine)
	@$(BIN)/python -m load_tests.scenarios.threads $(ARGS)

bench-cluster: install-dev ## measure what clients notice of losses of nodes, upgrades and renewed certificates (minutes; needs root)
	@$(BIN)/python -m load_tests.scenarios.cluster $(ARGS)

bench-autoscale: install-dev ## size a fleet for a day of traffic shaped like a trace (TRACE=…), in virtual time (minutes)
	@test -n "$(TRACE)" || { echo "error: name the trace: make bench-autoscale TRACE=mooncake_conversation.jsonl" >&2; exit 2; }
	@$(BIN)/python -m load_tests.scenarios.autoscale $(TRACE) $(ARGS)

bench-regions: install-dev ## run a day over five regions, by Kvasir's choice of a cell and by others, in virtual time (minutes)
	@$(BIN)/python -m load_tests.scenarios.regions $(ARGS)

bench-models: install-dev ## run tiny models of many architectures on real engines, into docs/MODELS.md (an hour; ARGS="--only gemma3")
	@$(BIN)/python -m load_tests.scenarios.models $(ARGS)

bench-truth: install-dev ## compare predictions of the performance model with loads of real engines (a quarter of an hour)
	@$(BIN)/python -m load_tests.scenarios.truth $(ARGS)

bench-scaling: install-dev ## measure how soon a pool follows its load, on real Ray Serve (minutes)
	@$(BIN)/python -m load_tests.scenarios.scaling $(ARGS)

bench-instructions: install-dev ## count a router's instructions for a request, in valgrind (minutes; needs valgrind and faketime)
	@$(BIN)/python -m load_tests.scenarios.instructions $(ARGS)

bench-paired: install-dev ## run the benchmarks of a request's path at BASE=COMMIT and at the last commit, alternating (minutes)
	@test -n "$(BASE)" || { echo "error: name the commit to compare with: make bench-paired BASE=main~20" >&2; exit 2; }
	@$(BIN)/python -m load_tests.scenarios.paired $(BASE) $(ARGS)

bench-agreement: install-dev ## compare `kvasir bench` with aiperf on the same endpoints (minutes; installs aiperf into build/)
	@$(BIN)/python -m load_tests.scenarios.agreement $(ARGS)

frameworks-check: install-dev ## run test suites of client frameworks, unmodified, into docs/API.md (minutes; installs them into build/)
	@$(BIN)/python -m load_tests.scenarios.frameworks $(ARGS)

bench-alerts: install-dev ## measure how soon each fault fires an alert in a real Prometheus (a quarter of an hour)
	@$(BIN)/python -m load_tests.scenarios.alerts $(ARGS)

images-check: install-dev ## build both images on a base of debootstrap, and stream a completion through them (a quarter of an hour; needs root)
	@$(BIN)/python deploy/images_check.py $(ARGS)

scorecard: install-dev ## prove which faults are survived, with real processes (minutes; ARGS="--rows 1,4")
	@$(BIN)/python -m load_tests.scenarios.scorecard $(ARGS)

cluster-checks: install-dev ## check a release on a live cluster: losses, upgrades, a new installation (an hour; ARGS="--namespace llm"; needs kubectl, helm)
	@$(BIN)/python -m load_tests.cluster_checks $(ARGS)

reports: install-dev ## measure all that is stale in load_tests/reports, on an idle machine (hours; ARGS=--list shows it; TRACE=… AZURE=… BASE=…)
	@$(BIN)/python -m load_tests.suite $(if $(TRACE),--trace $(TRACE)) $(if $(AZURE),--azure $(AZURE)) $(if $(BASE),--base $(BASE)) $(ARGS)

clean: ## remove build outputs and caches (.venv stays; delete it to start over)
	@rm -rf build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find platform router workers tests load_tests models -name __pycache__ -type d -prune -exec rm -rf {} +
