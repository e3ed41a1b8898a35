# The commands of the README are `make train`, `make test` and `make quick`; each starts from a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

QUICK := .venv-quick-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
OLDEST := .venv-oldest
DOCS := .venv-docs

FAULTS ?= 30
SEED ?= 0

# Also where the environment says otherwise: the tests start many processes.
export PYTHONDONTWRITEBYTECODE =

.PHONY: train test pytest long library quick usual oldest soak docs setup lint clean

# glibc keeps freed memory: on CPUs, XLA allocates the temporary arrays of every step anew.
train: export MALLOC_MMAP_MAX_ = 0
train: export MALLOC_TRIM_THRESHOLD_ = 2147483647
train: export MALLOC_ARENA_MAX = 1
train: $(VENV)/.experiments
	$(BIN)/python -m experiments sweep icons --over loss.name=sce,sce+nca,direct:sce+nca \
		--steps 400 --validate-every 200 --directory runs/train
	@echo "SCE⊕NCA, the direct sum, is direct:sce+nca."
	@echo "A single seed does not show the difference between SCE+NCA and SCE⊕NCA, and longer training"
	@echo "changes it: experiments/RESULTS.md, protocol A, has the differences over pairs of runs."

test: lint pytest

pytest: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 -m "not long"

# What `make test` leaves out: cases that differ from another one in an option, a dtype or a mesh; runs
# of several processes that are killed, stopped or refused; distributions of random augmentations;
# second derivatives of every loss.
long: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 -m long tests

# The tests of the library that `make test` runs, in an environment without the experiments'
# dependencies. `quick` leaves out the slow ones, and `usual` runs what `quick` does with the compiler
# as users have it.
usual: export JAX_DISABLE_MOST_OPTIMIZATIONS = 0
library: MARKERS := not long
quick usual: MARKERS := not slow
library quick usual: $(QUICK)/.quick
	$(QUICK)/bin/python -m pytest -n 2 -m "$(MARKERS)" tests/jaxloss jaxloss

# `quick` with the oldest supported versions; needs Python 3.11.
oldest: $(OLDEST)/.oldest
	$(OLDEST)/bin/python -m pytest -n 2 -m "not slow" tests/jaxloss jaxloss

# Random faults in runs of several processes, for about 20 minutes. It needs the right to mount.
soak: $(VENV)/.test
	$(BIN)/python -u -m tests.soak --faults $(FAULTS) --seed $(SEED)

# The site, in docs/_build/html. A warning is an error, and so is a link to a place that is not there.
docs: $(DOCS)/.docs
	@echo "Builds the site. At first, all notebooks and pictures run, which takes about ten minutes;"
	@echo "later only what changed. A change of jaxloss runs the notebooks again."
	@$(DOCS)/bin/python -m sphinx -b html -d docs/_build/doctrees -W --keep-going -n -q docs docs/_build/html
	@$(DOCS)/bin/python docs/check_links.py docs/_build/html
	@echo "Open docs/_build/html/index.html in a browser."

setup: $(VENV)/.test

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

clean:
	rm -rf $(VENV) .venv-quick-* $(OLDEST) $(DOCS) .pytest_cache .ruff_cache
	rm -rf docs/_build docs/auto_gallery

$(BIN)/python:
	@echo "creating the environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip

# Installs an extra in an environment. `compileall` uses all cores, and pip one; some packages hold
# files that are no Python 3.
define install
	@echo "installing .[$(2)] in $(1): a minute or more, with downloads of some hundred MB"
	@$(1)/bin/python -m pip install --quiet --no-compile --editable ".[$(2)]" $(3)
	@$(1)/bin/python -m compileall -qq -j 0 $(1)/lib || true
endef

# A stamp for each extra: installed again when pyproject.toml changes.
$(VENV)/.experiments: pyproject.toml | $(BIN)/python
	$(call install,$(VENV),experiments)
	touch $@

# From TORCH_INDEX, if it is set, comes PyTorch and nothing else: an extra index would serve all packages.
TORCH = $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml | head -1)

$(VENV)/.test: pyproject.toml | $(BIN)/python
	@$(if $(TORCH_INDEX),$(BIN)/python -m pip install --quiet --no-deps --index-url $(TORCH_INDEX) $(TORCH))
	$(call install,$(VENV),test)
	touch $@ $(VENV)/.experiments

$(QUICK)/.quick: pyproject.toml
	$(PYTHON) -m venv $(QUICK)
	$(call install,$(QUICK),quick)
	touch $@

$(OLDEST)/.oldest: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(call install,$(OLDEST),quick,jax==0.7.2 jaxlib==0.7.2 optax==0.2.5 jaxtyping==0.3.0)
	touch $@

$(DOCS)/.docs: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(call install,$(DOCS),docs)
	touch $@
