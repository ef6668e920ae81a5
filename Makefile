# Everything sets itself up: each target needs Python 3.10 or newer, make, and pip's usual access to PyPI.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
# torch first and pinned, so that nothing that follows resolves another one.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SPEC := pyproject.toml constraints.txt

.PHONY: help demo test test-gpu test-slow lint format types docs docs-serve build check clean
.DEFAULT_GOAL := help

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## prune a real sentence encoder and compare it with the original (about two minutes)
	$(BIN)/shearling demo --out demo-output --force

test: $(VENV)/.dev ## the unit suite
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not gpu"

test-gpu: $(VENV)/.dev ## what only a GPU shows; skipped, and said so, where there is none
	$(BIN)/python -m pytest -m gpu -rs tests/gpu

test-slow: $(VENV)/.dev ## more cases of unit tests, and accuracy and scale on the real checkpoints of ../shared, if any
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.dev ## ruff and strict mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs ## the documentation site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.docs ## the documentation site, live
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

build: $(VENV)/.dev ## wheel and sdist, into dist/
	rm -rf dist
	$(BIN)/python -m build --quiet
	@ls -l dist

check: lint test docs ## what a change has to pass

clean: ## remove what these targets made
	rm -rf $(VENV) site dist build demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.base: $(SPEC)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "shearling needs Python 3.10 or newer; say make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) -e .
	@touch $@

$(VENV)/.demo: $(VENV)/.base
	$(INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(INSTALL) -e '.[dev,demo,docs,export]'
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	$(INSTALL) -e '.[docs]'
	@touch $@
