# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
# Each process takes half of the tests, and then of what the other has left: a file's fixtures are made once.
PROCESSES := -n $${TEST_PROCESSES:-2} --dist worksteal
# What sums differently: PyTorch without AVX, NumPy in place of the compiled loops, two threads (that do not spin).
OTHERWISE := ATEN_CPU_CAPABILITY=default CODD_NATIVE=0 CODD_TEST_THREADS=2 OMP_WAIT_POLICY=PASSIVE
ROOMS := $(addprefix tests/,circuits coupling decoding backbones)

.PHONY: help demo test package lint browser docs bench clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

demo: $(VENV)/.ready ## install, and show the library at work on this machine
	@$(BIN)/codd demo

test: $(VENV)/.ready-dev lint browser ## install, then lint, types and all tests
	$(BIN)/python -m pytest $(PROCESSES)
	$(OTHERWISE) $(BIN)/python -m pytest $(PROCESSES) -m numerics $(ROOMS)

package: $(VENV)/.ready ## wheel and sdist, installed into an empty environment without a compiler, and used there
	.ci/package $(BIN)/python

lint: $(VENV)/.ready-dev ## style and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

browser: ## Debian's chromium for the tests of the playground, where it may be installed
	@command -v chromium >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq \
	       && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium fonts-dejavu-core >/dev/null; } \
	  || echo "no chromium here, and no way to install it: the tests of the playground are skipped"

# A page, link or name that is not there ends the build.
docs: $(VENV)/.ready-docs ## the documentation site, into site/: open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.ready ## the CPU benchmark against other libraries (installs them beside, in .venv-bench)
	$(MAKE) VENV=.venv-bench .venv-bench/.ready-bench
	.venv-bench/bin/python benchmarks/circuits_cpu.py

# PyTorch is asked for by its exact version first: any other spelling may bring gigabytes of GPU packages along.
$(VENV)/.python: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$(TORCH)"
	@touch $@

$(VENV)/.ready: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[serve]"
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.python pyproject.toml lab/pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" -e lab
	@touch $@ $(VENV)/.ready

$(VENV)/.ready-docs: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@touch $@

# The rivals pin other versions of NumPy and JAX than we do, hence no constraints but PyTorch's.
$(VENV)/.ready-bench: $(VENV)/.python pyproject.toml lab/pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" -e ".[bench]" -e lab
	@touch $@

clean: ## remove the environments and caches
	rm -rf .venv .venv-bench site .pytest_cache .mypy_cache .ruff_cache .hypothesis
