# The two commands of the README: `make demo` and `make test`. Everything lives in .venv; PYTHON picks another 3.11+.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
DEMO_EXTRAS := export,onnxruntime
TEST_EXTRAS := $(DEMO_EXTRAS),compare,kernels,tensorrt-rtx,dev

.PHONY: help demo test test-large lint bench clean

help:
	@echo "make demo        synthetic checkpoint -> ONNX stages -> text, compared with eager torch"
	@echo "make test        all tests but the large ones"
	@echo "make test-large  tests that need minutes or gigabytes"
	@echo "make lint        formatting, lint, types, import rules, spelling"
	@echo "make bench       speed of this machine, as JSON lines"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml
	@echo "Installing into $(VENV). To download, if not cached: torch 2.13.0 (0.2 GB for the CPU build, 3 GB for the"
	@echo "CUDA build with its libraries; either works, whichever pip finds) and 0.1 GB of other packages."
	$(PIP) install --quiet --disable-pip-version-check -e ".[$(DEMO_EXTRAS)]"
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@echo "Installing the test tools: 0.6 GB more, most of it TensorRT-RTX and Triton."
	$(PIP) install --quiet --disable-pip-version-check -e ".[$(TEST_EXTRAS)]"
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/engram-trt demo --out demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not large"

test-large: $(VENV)/.test
	$(BIN)/python -m pytest -m large

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

bench: $(VENV)/.demo
	$(BIN)/python tests/benchmarks/chain.py

clean:
	rm -rf demo build *.egg-info
