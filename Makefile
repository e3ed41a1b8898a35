# The two commands of the README are `make train` and `make test`; both start from a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train test setup lint clean

train: $(VENV)/.experiments
	$(BIN)/python -m experiments compare icons --losses sce nca sce+nca direct:sce+nca --directory runs/train

test: lint
	$(BIN)/python -m pytest -n 2

setup: $(VENV)/.test

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# A stamp for each extra: installed again when pyproject.toml changes.
$(VENV)/.experiments: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[experiments]"
	touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@ $(VENV)/.experiments
