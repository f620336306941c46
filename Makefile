# Everything from nothing: each target makes the virtual environment first, once.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
BENCH := .venv-bench
ROWS := $(filter-out benchmarks/corpus_texts.py benchmarks/in_turn.py,$(wildcard benchmarks/*.py))

# Packages are compiled when they are first imported, so Python must be allowed to keep what it compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check reference bench clean

demo: $(READY)          ## the whole way on this machine's own files
	$(BIN)/piledriver demo

test: $(READY)          ## every test, fast ones first
	$(BIN)/python -m pytest -n auto --dist worksteal

check: $(READY)         ## style, types, floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

reference: $(READY)     ## docs/reference/config.md from the docstrings of the config classes
	$(BIN)/python -m piledriver.cli.reference docs/reference/config.md

bench: $(BENCH)/.ready  ## one JSON line per row of the scoreboard, side by side with the peers
	@for row in $(ROWS); do $(BENCH)/bin/python $$row || exit 1; done

clean:
	rm -rf $(VENV) $(BENCH)

# Half of a set-up was an old pip reading index pages, and compiling what is never imported. So: a pip of today; every
# pinned package, with nothing to resolve; then the project, which looks whether the pins are complete and fit together.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) pip==26.3 setuptools==84.2.1
	$(PIP) --no-deps -r constraints.txt
	$(PIP) --no-build-isolation -c constraints.txt -e '.[dev]'
	touch $(READY)

$(BENCH)/.ready: pyproject.toml benchmarks/requirements.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -e '.[all]' -r benchmarks/requirements.txt
	touch $(BENCH)/.ready
