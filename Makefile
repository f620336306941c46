# Everything from nothing: each target makes the virtual environment first, once.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check bench clean

demo: $(READY)          ## the whole way on this machine's own files
	$(BIN)/piledriver demo

test: $(READY)          ## every test, fast ones first
	$(BIN)/python -m pytest -n auto --dist worksteal

check: $(READY)         ## style, types, floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)         ## one JSON line per row of the scoreboard
	@for row in benchmarks/*.py; do $(BIN)/python $$row || exit 1; done

clean:
	rm -rf $(VENV)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)
