# `make demo` and `make test` work on a fresh machine with nothing but Python 3.11 or later.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# constraints.txt pins torch to a build that also exists for CPUs; CONSTRAINTS= leaves the choice to pip.
CONSTRAINTS ?= -c constraints.txt
PIP = $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test lint bench clean

demo: $(VENV)/.installed
	PATH="$(CURDIR)/$(BIN):$$PATH" sh jobscripts/demo/demo.sh

# The tests under batch systems wait most of their time: they do so beside those that compute.
test: $(VENV)/.installed-dev
	@log=$$(mktemp); $(BIN)/python -m pytest tests/slurm tests/lsf >$$log 2>&1 & waiting=$$!; \
	trap "kill $$waiting" INT TERM; \
	$(BIN)/python -m pytest tests/unit tests/property tests/sim tests/conformance tests/live tests/gpu; code=$$?; \
	wait $$waiting || code=1; cat $$log; rm -f $$log; exit $$code

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/run_all.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python setup.cfg constraints.txt
	$(PIP) install -q $(CONSTRAINTS) -e '.[torch,report,plan,examples]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install -q $(CONSTRAINTS) -e '.[torch,report,plan,examples,dev]'
	touch $@

clean:
	rm -rf $(VENV) demo-run build *.egg-info
