# Everything runs in its own virtual environment, made on first use from pyproject.toml and constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS := $(VENV)/.docs
# Tiny tensors: two processes gain more than a second thread in each.
# Compiled files are kept, also where the environment says no: tests start some processes of their own.
TEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

.PHONY: run test test-slow faults lint check format docs dist clean

run: $(READY)  ## compare private optimizers at equal epsilon on scikit-learn's digits, in a minute or two
	$(BIN)/vestige compare --quick

test: $(READY)  ## the everyday tests
	$(TEST)

test-slow: $(READY)  ## all tests, the slow ones too
	VESTIGE_TESTS_AT_NIGHT=1 $(TEST) -m ""

faults: $(READY)  ## that the everyday tests catch every fault of tests/seeded_faults.toml
	$(BIN)/python bench/seeded_faults.py --jobs 2

lint: $(READY)  ## formatting, lint and types
	$(BIN)/ruff format --check src tests bench examples docs/conf.py
	$(BIN)/ruff check src tests bench examples docs/conf.py
	$(BIN)/mypy

check: lint  ## the same, doctests and tests
	$(TEST) --doctest-modules --doctest-ignore-import-errors src/vestige tests

docs: $(DOCS)  ## the documentation site, in build/site; a broken link or docstring fails
	$(BIN)/python -m sphinx -q -W --keep-going -E -b html docs build/site
	@echo "open build/site/index.html"

dist: $(READY)  ## a wheel and a source archive in dist/, checked, and the wheel installed in an environment of its own
	rm -rf dist build/dist build/lib
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build twine
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/dist
	build/dist/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd build && dist/bin/vestige --version && dist/bin/vestige train --epsilon 8 --steps 3 --out dist/run --json > /dev/null
	cd build && dist/bin/vestige verify dist/run

format: $(READY)
	$(BIN)/ruff format src tests bench examples docs/conf.py
	$(BIN)/ruff check --fix src tests bench examples docs/conf.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

$(DOCS): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $(DOCS)

clean:
	rm -rf build dist $(VENV) .pytest_cache .mypy_cache .ruff_cache
