# Two commands need nothing but this checkout, a Python and, the first time, a package index:
#
#   make demo      see it work
#   make test      lint, types, docs and the test suite, as CI runs them
#
# Both live in one .venv. A stamp in it says which packages are in; its name depends on
# pyproject.toml, what is compiled, the place of the checkout and the Python, so that a second run
# installs nothing and opens no network connection.

PYTHON ?= python3
BIN := .venv/bin
PYTHON_VERSION := $(shell $(PYTHON) -c 'import platform; print(platform.python_version())' 2>/dev/null)
KEY := $(shell (cat pyproject.toml hatch_build.py dask_redist/_stream.c; pwd; echo $(PYTHON_VERSION)) | cksum | cut -d' ' -f1)
VENV := .venv/python-$(PYTHON_VERSION)
HAS_DEMO := .venv/demo-$(KEY)
HAS_TEST := .venv/test-$(KEY)
# The Python sides of the GPU packages, without CUDA: 9 seconds, 410 MB. In a folder of their own,
# so that nothing but the tests in tests/gpu finds them.
GPU := .venv/gpu
HAS_GPU := .venv/gpu-$(shell cksum < tests/gpu/packages.txt | cut -d' ' -f1)
RESULTS := benchmarks/results
# On MPI ranks that share memory, too; with MPI between them they run in --everything.
ON_MPI_RANKS := $(addprefix tests/,test_redistribute.py test_redistribution.py test_reduce.py \
  test_dist.py test_replicated.py test_rankcomm.py cases)

.PHONY: help demo test test-all bench conformance lint types docs pictures clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(HAS_DEMO)
	$(BIN)/dask-redist demo

test: lint types docs $(HAS_GPU)
	$(BIN)/python -m pytest

test-all: lint types docs $(HAS_GPU)
	$(BIN)/python -m pytest --everything
	$(BIN)/python -m pytest --mpi --ranks 3 $(ON_MPI_RANKS)
	$(BIN)/python -m pytest --mpi --ranks 1,2,4,5 -m sample $(ON_MPI_RANKS)
	$(BIN)/python tests/conformance/passes.py

# Takes most of an hour; the machine should do nothing else meanwhile.
bench: $(HAS_TEST)
	mkdir -p $(RESULTS)
	for ranks in 2 4; do for mib in 512 1024; do $(BIN)/dask-redist bench --ranks $$ranks \
	  --size "$$mib MiB" --json $(RESULTS)/bench-$$ranks-$$mib.json \
	  --png $(RESULTS)/bench-$$ranks-$$mib.png || exit 1; done; done
	$(BIN)/dask-redist bench --ranks 4 --size "1 MiB" --chunks 64 --rounds 20 \
	  --only "Slab.X -> Slab.Y" --json $(RESULTS)/small.json
	for script in exchange mpi cold peak reductions graph_build datasets; do \
	  $(BIN)/python benchmarks/$$script.py --json $(RESULTS)/$$script.json || exit 1; done

conformance: $(HAS_TEST)
	$(BIN)/python tests/conformance/passes.py

lint: $(HAS_TEST)
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check

types: $(HAS_TEST)
	$(BIN)/python -m mypy

docs: $(HAS_TEST)
	rm -rf docs/generated
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

# What Jupyter shows, as images; needs Chromium.
pictures: $(HAS_TEST)
	$(BIN)/python docs/pictures.py docs/_build/pictures

clean:
	rm -f dask_redist/_stream.so
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist docs/_build docs/generated
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(HAS_DEMO): | $(VENV)
	rm -f .venv/demo-*
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	touch $@

# The test extra holds the demo's packages, hence both stamps.
$(HAS_TEST): | $(VENV)
	rm -f .venv/demo-* .venv/test-*
	$(BIN)/python -m pip install --quiet --editable '.[test,docs]'
	touch $(HAS_DEMO) $(HAS_TEST)

$(HAS_GPU): tests/gpu/packages.txt | $(VENV)
	rm -rf $(GPU) .venv/gpu-*
	$(BIN)/python -m pip install --quiet --no-deps --target $(GPU) -r $<
	touch $@

$(VENV):
	$(if $(call python_fails,import sys; sys.exit(sys.version_info < (3, 11))),\
	  $(error dask_redist needs Python 3.11 or newer and $(PYTHON) is not: install one, \
	  or name one with `make PYTHON=python3.12`))
	$(if $(call python_fails,import ensurepip; import venv),\
	  $(error $(PYTHON) lacks venv or ensurepip: install them (Debian: apt install python3-venv), \
	  or name another Python with `make PYTHON=python3.12`))
	$(PYTHON) -m venv --clear .venv
	touch $@

python_fails = $(shell $(PYTHON) -c '$(1)' >/dev/null 2>&1 || echo yes)
