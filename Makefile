# `make demo` and `make test` are all a new user needs; each installs what it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO_INSTALLED := $(VENV)/.demo-installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

.PHONY: help install demo docs wheel static test test-slow test-audit test-faults test-web test-federation bench clean

help:
	@echo "make demo     a private step timed, methods at one ε, a budget that holds (some minutes)"
	@echo "make test     formatter, linter, types, imports, tests"
	@echo "make test-slow  what takes longer: whole studies, a clean install of the wheel, networks of real size"
	@echo "make test-federation   Flower and NVIDIA FLARE, with real processes (70 minutes on busy cores)"
	@echo "make test-faults  200 kills, full disks, long fuzzing (40 minutes on busy cores)"
	@echo "make test-audit   attacks on every method, and on mechanisms broken on purpose (the latter 14 minutes)"
	@echo "make test-web the report in a real browser (Chromium)"
	@echo "make bench    step times against peers"
	@echo "make docs     the documentation site, in site/ (no network to read it)"
	@echo "make wheel    dist/xcal_fl-VERSION-py3-none-any.whl, to install elsewhere"
	@echo "make install  only the set-up: .venv with the package and its test extra"

# pip takes torch's CPU build where one is at hand; the constraints pin every version. All cores
# compile what pip would compile on one; a file of a package that does not compile is not imported.
$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "== Installing xcal and its test extra into $(VENV) (once) =="
	@$(PIP) -e '.[test]'
	@$(COMPILE)
	@touch $(INSTALLED) $(DEMO_INSTALLED)

$(DEMO_INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "== Installing xcal and what the demo needs into $(VENV) (once) =="
	@$(PIP) -e '.[demo]'
	@$(COMPILE)
	@touch $(DEMO_INSTALLED)

install: $(INSTALLED)

demo: $(DEMO_INSTALLED)
	@echo "== Demo: speed, methods, budget (runs/demo) =="
	@$(BIN)/xcal demo --out runs/demo

# Warnings are errors, and so is anything that a page would fetch.
docs: install
	@$(PIP) -e '.[docs]'
	@$(BIN)/python docs/make_site.py --out site

wheel: install
	@$(PIP) setuptools
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

# Two workers of one torch thread each: the tests are many and small. A file stays with one of them,
# so that what its tests share is trained once. Every step of a run waits for the disk: where
# there is memory to spare the runs are written there, and kept only of tests that failed.
ROOMY := [ "$$(df -k --output=avail /dev/shm 2>/dev/null | tail -1)" -gt 4000000 ]
IN_MEMORY := $(shell $(ROOMY) 2>/dev/null && echo TMPDIR=/dev/shm)
PYTEST := $(IN_MEMORY) OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 \
	--dist loadfile -o tmp_path_retention_policy=failed

static: install
	@echo "== Format, lint, types, imports =="
	@$(BIN)/ruff format --check --quiet src tests benchmarks docs examples reproduce
	@$(BIN)/ruff check --quiet src tests benchmarks docs examples reproduce
	@$(BIN)/mypy
	@$(BIN)/lint-imports

test: static
	@echo "== Tests (slower ones: make test-slow) =="
	@$(PYTEST) --ignore tests/web -m "not slow"

test-slow: install
	@echo "== Tests that take long: whole studies, wheels, real sizes =="
	@$(PYTEST) --ignore tests/web -m slow

# Needs a Chromium on the machine (XCAL_CHROMIUM names another than `chromium`).
test-web: install
	@echo "== The report in a real browser =="
	@$(PIP) -e '.[web]'
	@$(PYTEST) -n 0 tests/web

test-faults: install
	@echo "== Faults: damaged files, full disks, hostile servers, at length =="
	@XCAL_FAULTS=long $(PYTEST) --timeout 3600 tests/faults tests/properties/test_configurations.py \
		tests/properties/test_sensitivity.py
	@echo "== Faults: 200 kills (benchmarks/results/faults) =="
	@PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python tests/kill_chain.py --kills 200 --seed 8 --cold-every 5

# Real processes on loopback; the engines are extras, so they are installed here.
# Files of tests that take longest begin: pytest-xdist would begin with the files of most tests.
FEDERATION := $(sort $(wildcard tests/federation/test_*.py))
LONGEST := $(patsubst %,tests/federation/test_%.py,flare_kills flower flare_recovery masked_engines \
  engines_take_over own_apps flare_federation flare_members)

test-federation: install
	@echo "== Federation: messages, sites, engines =="
	@$(PIP) -e '.[test,flower,nvflare]'
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 XCAL_TEST_FEDERATION=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder \
	  $(LONGEST) $(filter-out $(LONGEST),$(FEDERATION))

test-audit: install
	@echo "== Attacks on every method (runs/audit) =="
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/xcal audit --out runs/audit
	@echo "== Mechanisms broken on purpose =="
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python tests/audit/run_mutants.py

bench: install
	@echo "== Step times against peers (benchmarks/results) =="
	@$(BIN)/python benchmarks/step_times.py

clean:
	rm -rf $(VENV) runs build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
