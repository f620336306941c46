# Each target sets up the virtual environment first, once.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
BENCH := .venv-bench
ROWS := $(filter-out benchmarks/corpus_texts.py benchmarks/in_turn.py benchmarks/report.py,$(wildcard benchmarks/*.py))

# Packages are compiled when they are first imported, so Python must be allowed to keep what it compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-gpu check reference bench clean

demo: $(READY)          ## corpus, tokenizer, model and bits per byte from this machine's own files
	$(BIN)/piledriver demo

test: $(READY)          ## every test, fast ones first
	$(BIN)/python -m pytest -n auto --dist worksteal

# In an environment that has torch and pytest already: nothing is installed. PYTHON chooses the interpreter.
test-gpu:               ## the tests that need a GPU
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu $$(grep -rlE 'mark\.gpu|ON_GPU' tests --include='test_*.py')

test-leaks: $(READY)    ## training loops of the tests under the leak watch: an alarm fails
	rm -f leak-alarms.txt
	PYTHONPATH=tests/fixtures/leak_watch PILEDRIVER_LEAK_ALARMS=$(CURDIR)/leak-alarms.txt $(BIN)/python -m pytest \
	  -n auto --dist worksteal tests/train tests/accelerator tests/engine tests/test_examples.py
	! grep ALARM leak-alarms.txt

check: $(READY)         ## style, types, floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

reference: $(READY)     ## docs/reference/config.md from the docstrings of the config classes
	$(BIN)/python -m piledriver.cli.reference docs/reference/config.md

bench: $(BENCH)/.ready  ## JSON lines of every benchmark, measured beside its peers; see benchmarks/report.py
	@for row in $(ROWS); do $(BENCH)/bin/python $$row || exit 1; done

clean:
	rm -rf $(VENV) $(BENCH)

# Fast set-up: a recent pip; the pinned packages without resolving; then the project, which checks that the pins are
# complete and fit together.
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
