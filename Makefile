# Each target sets up what it needs in .venv. `make` alone lists them.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
STAMP := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
# Apart: what looks at the dependencies brings its own.
AUDIT := .venv-audit
# For example `-s osv`, or `--osv-url URL` for a service of your own.
AUDIT_OPTIONS ?=
# Tests side by side. Real processes often wait for one another, so more of them fit.
WORKERS ?= 3
FEDERATIONS ?= 4
SECONDS ?= 600
# Where tests are marked `alone`: they hold bounds in seconds, and run when no other test does.
ALONE := tests/integration/test_soak.py tests/unit/toolkit/test_program.py
# The fuzzer, for `make fuzz` and `make test-long`. No test of `make test` needs it.
ATHERIS := atheris==3.0.0
# One thread for each training process: several share a small machine.
export OMP_NUM_THREADS ?= 1
# Compiled modules are kept, whatever the environment says: without them, each process compiles torch again, and each
# test process all the tests.
unexport PYTHONDONTWRITEBYTECODE
# Test processes of one run share the process that forks their commands.
export TACIT_TESTS_RUN ?= $(shell echo $$PPID)

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick test-processes test-long check check-types check-others docs audit fuzz gen format bench bench-secagg clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Tacit needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP) ## five members train together on this machine, one is killed, one comes late (DATA=folder BACKBONE=wheel)
	$(BIN)/python -m examples.demo $(if $(DATA),--data $(DATA)) $(if $(BACKBONE),--backbone $(BACKBONE))

# pip compiles nothing. Seven processes of `make test` import torch and the tests at the same moment, and each would
# compile them. Where a test cannot be collected, the tests say so.
$(COMPILED): $(STAMP)
	$(BIN)/python -c 'from tests.support import warm; warm.import_everything()'
	@$(BIN)/python -m pytest -q --collect-only tests > /dev/null || true
	@touch $@

test: $(COMPILED) ## every test but the slow sweeps
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target test-processes test-quick
	$(BIN)/python -m pytest -q -m 'alone and not long' $(ALONE)

# Side by side: processes often wait for one another, and the tests without processes take what they leave. Stealing
# keeps the tests of a module in one process, which shares what they make, until another process has nothing left.
test-quick: $(STAMP)
	$(BIN)/python -m pytest -q -m 'not long and not alone' -n $(WORKERS) --dist worksteal tests --ignore=tests/integration

test-processes: $(STAMP)
	$(BIN)/python -m pytest -q -m 'not long and not alone' -n $(FEDERATIONS) --dist loadscope --no-loadscope-reorder \
		tests/integration

test-long: $(STAMP) ## the slow sweeps
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(ATHERIS)
	$(BIN)/python -m pytest -q -m long

check: $(STAMP) ## ruff with its security rules, mypy --strict, import-linter, generated code, the site, pins and licences
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target check-types check-others

# On two cores: mypy on one, everything else on the other. What it has left is used to compile for `make test`.
check-types: $(STAMP)
	$(BIN)/mypy

check-others: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python proto/generate.py --check
	@$(MAKE) --no-print-directory docs
	$(BIN)/python -m pytest -q tests/unit/security/test_dependencies.py tests/unit/security/test_no_code_from_data.py
	@$(MAKE) --no-print-directory $(COMPILED)

docs: $(STAMP) ## the documentation site, in site/: a dead link fails it
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

audit: ## known holes in what constraints.txt pins: asks an advisory service on the network
	test -x $(AUDIT)/bin/python || $(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1
	$(AUDIT)/bin/pip-audit -r constraints.txt --no-deps --disable-pip $(AUDIT_OPTIONS)

fuzz: $(STAMP) ## every reader of bytes from outside, SECONDS (600) each
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(ATHERIS)
	$(BIN)/python -m tests.fuzz all --seconds $(SECONDS)

bench: $(STAMP) ## the benchmarks, cell by cell, and their tables (hours, the first time)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench,ray]'
	for name in $$($(BIN)/python -m benchmarks --names); do $(BIN)/python -m benchmarks.$$name || exit 1; done
	$(BIN)/python -m benchmarks.report

bench-secagg: $(STAMP) ## secure aggregation alone: beside the clear, beside Flower, its limits, its cost (45 minutes)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks.secure_aggregation.costs

gen: $(STAMP) ## regenerate the code of proto/tacit/v1
	$(BIN)/python proto/generate.py

format: $(STAMP) ## put the code in order
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the virtual environment, the site and caches
	rm -rf $(VENV) $(AUDIT) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache site
