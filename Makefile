# make train      the main job: a small language model, two processes
# make unit       the tests of single parts, in a minute or two
# make test       lint, types and the tests that are not marked slow
# make test-all   lint, types and every test, with the packages that only some tests need
# make test-gpu   the tests that need a GPU: kernels, streams, one and two ranks on one device
# make test-torch TORCH=2.11.0   the tests that are not marked slow, with that version of torch, in an environment of its own
# make site     the documentation as a site with search and API reference, in site/
# make lint | types | docs | bench | clean
#
# Two processes run tests at the same time: TEST_PROCESSES=4 for more.
# All of them run in .venv (test-torch in .venv-torch-VERSION), which is made and filled on the first call and again only
# when setup.py, constraints.txt or the version changed. To choose the interpreter or to pass arguments to pip:
#   make test PYTHON=python3.12 PIP_ARGS="--index-url https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple"

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
TEST_PROCESSES ?= 2
NPROC ?= 2
CONFIG ?= examples/gpt/configs/zero2.json
TRAIN_ARGS ?=
BENCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ALL_INSTALLED := $(VENV)/.installed-all
BENCH_INSTALLED := $(VENV)/.installed-bench
DOCS_INSTALLED := $(VENV)/.installed-docs
PIP := $(BIN)/python -m pip --disable-pip-version-check
INPUTS := setup.py constraints.txt zerolite/version.py
CONSTRAINTS := $(VENV)/constraints.txt
TORCH_PIN := $(shell sed -n '/^torch==/p' constraints.txt)
# A file's tests run one after the other in one process. Files go to whichever process is free, in their order: the long
# ones of tests/cli come early.
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# Without bytecode each process that a test starts would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help train unit test test-all test-gpu test-torch pytest lint types docs site bench clean
.DELETE_ON_ERROR:

help:
	@sed -n '/^# make /s/^# //p' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "zerolite needs Python 3.10 or newer, and $(PYTHON) is %d.%d: say `make PYTHON=python3.12 ...`" % sys.version_info[:2])'
	@$(PYTHON) -c 'import ensurepip' || { echo "$(PYTHON) cannot make virtual environments: install its venv package (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(CONSTRAINTS): constraints.txt | $(BIN)/python
	sed 's/^torch==.*/$(TORCH_PIN)/' constraints.txt >$@

# torch comes first and by its exact version, so that pip takes the build that its index prefers.
$(INSTALLED): $(INPUTS) | $(CONSTRAINTS)
	$(PIP) install $(PIP_ARGS) $(TORCH_PIN)
	$(PIP) install $(PIP_ARGS) -c $(CONSTRAINTS) -e '.[test,plot,digits]'
	@touch $@

# Most of what OpenRLHF requires needs CUDA, and its test uses none of that. Without the package the test is skipped.
$(ALL_INSTALLED): $(INSTALLED) | $(CONSTRAINTS)
	$(PIP) install $(PIP_ARGS) -c $(CONSTRAINTS) -e '.[transformers,lora,clients,ray,tensorboard,docs]'
	-$(PIP) install $(PIP_ARGS) --no-deps openrlhf==0.11.2
	@touch $@

$(DOCS_INSTALLED): $(INSTALLED) | $(CONSTRAINTS)
	$(PIP) install $(PIP_ARGS) -c $(CONSTRAINTS) -e '.[docs]'
	@touch $@

$(BENCH_INSTALLED): $(INSTALLED) | $(CONSTRAINTS)
	$(PIP) install $(PIP_ARGS) -c $(CONSTRAINTS) -e '.[bench]'
	@touch $@

train: $(INSTALLED)
	$(BIN)/zerolite --nproc $(NPROC) examples/gpt/train.py --config $(CONFIG) $(TRAIN_ARGS)

define LINT
$(BIN)/ruff check .
$(BIN)/ruff format --check .
endef

lint: $(INSTALLED)
	$(LINT)

types: $(INSTALLED)
	$(BIN)/mypy

unit: $(INSTALLED)
	$(PYTEST) -m "not slow" $(PYTEST_ARGS) tests/unit

# pytest runs last, so that its summary is the last line.
test: $(INSTALLED)
	$(LINT)
	$(BIN)/mypy
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

# Run make again with another environment and another torch in its constraints.
test-torch:
	@test -n "$(TORCH)" || { echo "make test-torch needs a version: make test-torch TORCH=2.11.0" >&2; exit 1; }
	@$(MAKE) --no-print-directory pytest VENV=.venv-torch-$(TORCH) TORCH_PIN=torch==$(TORCH)

pytest: $(INSTALLED)
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: $(ALL_INSTALLED)
	$(LINT)
	$(BIN)/mypy
	$(PYTEST) $(PYTEST_ARGS)

test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

docs: $(INSTALLED)
	$(BIN)/python docs/configuration.py
	$(BIN)/python docs/files.py

site: $(DOCS_INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(BENCH_INSTALLED)
	$(BIN)/python benchmarks/compare.py $(BENCH_ARGS)

clean:
	rm -rf .venv .venv-torch-* build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache runs examples/*/runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
