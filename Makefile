# `make demo` and `make test` are all a newcomer needs: each builds .venv when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# One thread a process: several processes share the cores, and the timings stay comparable.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# DeepSpeed on a machine without a GPU; a user's own choice wins.
export DS_ACCELERATOR ?= cpu

.PHONY: demo test quick lint types bench install clean
.DEFAULT_GOAL := test

install: $(READY)

# torch first and pinned: whatever comes later builds against it and must not replace it.
$(READY): requirements.txt setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $$(grep -E '^(setuptools|wheel|ninja|packaging|numpy)==' requirements.txt)
	$(BIN)/pip install --quiet $$(grep -E '^torch==' requirements.txt)
	$(BIN)/pip install --quiet --no-build-isolation -r requirements.txt
	$(BIN)/pip install --quiet --no-build-isolation --no-deps -e .
	touch $(READY)

demo: $(READY)
	$(BIN)/python -m hdet_scale.demo

# Two files of tests at a time: most of them wait for processes to start.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

# For everyday work: under two minutes, without what starts processes or takes seconds.
quick: lint
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory types

# mypy sees kernels/ where it is installed, as hdet_scale.kernels: through links, since it does
# not follow the editable install's import hook.
types: $(READY)
	rm -rf build/typed && mkdir -p build/typed/hdet_scale
	ln -s $(CURDIR)/hdet_scale/* $(CURDIR)/kernels build/typed/hdet_scale/
	cd build/typed && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p hdet_scale

bench: $(READY)
	$(BIN)/python -m benchmarks --short

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache
