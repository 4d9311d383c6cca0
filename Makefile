# `make demo` and `make test` work on a fresh machine with nothing but Python 3.11 or later.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# constraints.txt pins torch to a build that also exists for CPUs; CONSTRAINTS= leaves the choice to pip.
CONSTRAINTS ?= -c constraints.txt
PIP = $(BIN)/python -m pip --disable-pip-version-check
# Tests that start processes wait half of their time, so that four at a time keep two cores busy.
AT_ONCE ?= 4
# Which share of all tests `make test-part` takes: the K-th of N, K from 0; and no test begins after so many seconds.
# It always tries the same random examples; `make test-all` tries new ones.
PART ?= 0/8
WITHIN ?= 3600
# A file's tests share what is costly to make; the folders whose tests take longest come first.
PYTEST = $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

.PHONY: demo check unit test test-all test-part chaos chaos-real fuzz lint types style docs pages bench dist lock old-env clean

demo: $(VENV)/.installed
	$(BIN)/hpcsched demo

# While you work: what needs no process, no torch and no clock.
check: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory -j 3 types style unit

unit: $(VENV)/.installed-dev
	$(PYTEST) -n 2 -m "not slow and not long" --hypothesis-profile=check tests/unit

# Before a change lands: every feature once, a real Slurm among them.
test: $(VENV)/.installed-dev
	$(PYTEST) -n $(AT_ONCE) -m "not slow" tests

# For a night: long searches, repeated faults, benchmark programs.
test-all: $(VENV)/.installed-dev
	$(PYTEST) -n $(AT_ONCE) --hypothesis-profile=all tests

test-part: $(VENV)/.installed-dev
	$(PYTEST) -n $(AT_ONCE) --hypothesis-profile=all --hypothesis-seed=0 --part=$(PART) --within=$(WITHIN) tests

# Schedules of faults, for so many seconds (docs/adr/0063): on the virtual clock, and over real processes.
SECONDS ?= 60
chaos: $(VENV)/.installed-dev
	$(BIN)/python -m tests.chaos --seconds $(SECONDS)

chaos-real: $(VENV)/.installed-dev
	$(BIN)/python -m tests.chaos.real --seconds $(SECONDS)

# Inputs that nobody meant, for so long; all targets: ONLY=jobs,status for some.
fuzz: $(VENV)/.installed-dev
	PYTHONPATH=.:tests/support $(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(if $(ONLY),--only $(ONLY))

lint: types style

types: $(VENV)/.installed-dev
	$(BIN)/mypy

style: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/lint-imports
	$(BIN)/vermin -q -t=3.9- --eval-annotations --no-tips $$($(BIN)/python packaging/closure.py)

# The distributions, recipes of package managers for them, and what the wheel is made of (CycloneDX).
dist: $(VENV)/.installed-dev
	$(BIN)/python packaging/build.py
	$(BIN)/python packaging/recipes.py
	$(BIN)/python packaging/sbom.py

# What a reproducible installation takes (docs/packaging.md): each package at one version, with the hashes of its files.
lock: $(BIN)/python
	$(PIP) install -q uv
	$(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --extra report --extra plan \
		--custom-compile-command 'make lock' -o packaging/requirements.txt pyproject.toml

# Python 3.9 with torch 2.4, for the slow tests of hpcsched-worker; prints how these are told of it.
old-env:
	@packaging/old_env.sh .venv-old

# The documentation as a site, in build/docs; any link that leads nowhere is an error.
docs: $(VENV)/.installed-docs
	$(BIN)/sphinx-build -q -W --keep-going -n -c docs -d build/doctrees . build/docs
	@echo build/docs/docs/index.html

# What pages show of the code (reasons, states, rooms, strategies), and the schemas that editors read.
pages: $(VENV)/.installed-dev
	$(BIN)/python docs/tools/pages.py

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/run_all.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install -q $(CONSTRAINTS) -e '.[torch,report,plan,examples]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install -q $(CONSTRAINTS) -e '.[torch,report,plan,examples,dev]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) install -q $(CONSTRAINTS) -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) hpcsched-demo hpcsched-demo-* build dist *.egg-info
