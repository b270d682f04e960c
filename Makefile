# Two commands for newcomers: `make demo` and `make test`. Both set everything up themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs
# An environment of their own: with them in .venv, JAX would look for chips and complain every time.
AOT := .venv-aot
AOT_READY := $(AOT)/.ready

.PHONY: demo serve-demo train-demo test lint types docs aot check clean

demo: $(READY)  # a real model writes with speculation, then is timed against plain decoding
	$(BIN)/jspec generate --show-drafts --max-tokens 128 --file scripts/demo_prompt.txt
	$(BIN)/jspec bench --max-tokens 64 --repeats 1

serve-demo: $(READY)  # a server on free ports answers over gRPC and over HTTP, then drains and stops
	$(BIN)/python scripts/serve_demo.py

train-demo: $(READY)  # writes its own data, trains a small head, measures it on held-out prompts of that kind
	$(BIN)/jspec train-data --prompts training/configs/demo_prompts.jsonl \
	  --output runs/demo/data --features 2 15 27 30 --greedy-share 1 --batch-size 32 \
	  --max-tokens 64 --max-prompt-tokens 96 --limit 160
	$(BIN)/jspec train --config training/configs/demo.toml
	$(BIN)/python scripts/head_report.py --dataset training/configs/demo_prompts.jsonl --held-out 0.1 \
	  --head runs/demo/head/head --tokens 2 --limit-per-task 240 --max-tokens 64

test: $(READY)
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow and not gpu and not tpu and not aot"

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

docs: $(DOCS_READY)  # the pages, into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

aot: $(AOT_READY)  # compiles whole steps for TPUs and GPUs that are not here (Linux x86-64 only)
	JAX_PLATFORMS=cpu $(AOT)/bin/python -m pytest -m aot -rs

check: lint types test

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("jspec needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,train,serve]"
	touch $@

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[docs]"
	touch $@

$(AOT_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(AOT)
	$(AOT)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,train,serve,aot]"
	touch $@

clean:
	rm -rf $(VENV) $(AOT) build dist site
