# Two commands for newcomers: `make demo` and `make test`. Both set everything up themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# An environment of their own: with them in .venv, JAX would look for chips and complain every time.
AOT := .venv-aot
AOT_READY := $(AOT)/.ready

.PHONY: demo test lint types aot check clean

demo: $(READY)  # a real model writes with speculation, then is timed against plain decoding
	$(BIN)/jspec generate --show-drafts --max-tokens 128 --file scripts/demo_prompt.txt
	$(BIN)/jspec bench --max-tokens 64 --repeats 1

test: $(READY)
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu and not tpu and not aot"

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

aot: $(AOT_READY)  # compiles whole steps for TPUs and GPUs that are not here (Linux x86-64 only)
	JAX_PLATFORMS=cpu $(AOT)/bin/python -m pytest -m aot -rs

check: lint types test

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("jspec needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

$(AOT_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(AOT)
	$(AOT)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,aot]"
	touch $@

clean:
	rm -rf $(VENV) $(AOT)
