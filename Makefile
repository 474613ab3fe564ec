# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)

.PHONY: help demo test lint bench clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

demo: $(VENV)/.ready ## install, and show the library at work on this machine
	@$(BIN)/codd demo

test: $(VENV)/.ready-dev lint ## install, then lint, types and all tests
	$(BIN)/python -m pytest -n $${TEST_PROCESSES:-2}

lint: $(VENV)/.ready-dev ## style and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.ready ## the CPU benchmark against other libraries (installs them beside, in .venv-bench)
	$(MAKE) VENV=.venv-bench .venv-bench/.ready-bench
	.venv-bench/bin/codd bench circuits

# PyTorch is asked for by its exact version first: any other spelling may bring gigabytes of GPU packages along.
$(VENV)/.python: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$(TORCH)"
	@touch $@

$(VENV)/.ready: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@ $(VENV)/.ready

# The rivals pin other versions of NumPy and JAX than we do, hence no constraints but PyTorch's.
$(VENV)/.ready-bench: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" -e ".[bench]"
	@touch $@

clean: ## remove the environments and caches
	rm -rf .venv .venv-bench .pytest_cache .mypy_cache .ruff_cache .hypothesis
