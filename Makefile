# Everything lives in .venv, .venv-tflite-2.14 and build/. `make` alone lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
QUIET ?= --quiet
# Processes that the tests are shared out to, file by file as tests/conftest.py orders them; each may take some 3 GB.
WORKERS ?= 2
DEMO := build/demo

# The stamps say how far the venv is set up; a changed pyproject.toml makes them stale.
VENV_STAMP := $(VENV)/.stamp-venv
ALL_STAMP := $(VENV)/.stamp-all
FULL_STAMP := $(VENV)/.stamp-full

# The older of the two TFLite runtimes needs a NumPy that nothing else here takes, hence a venv of its own.
TFLITE214 := .venv-tflite-2.14
TFLITE214_STAMP := $(TFLITE214)/.stamp

# What sites run in, from npm; the first of its files stands for it.
WEB := build/onnxruntime-web/ort.wasm.min.mjs

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo train-demo test test-slow lint type bench clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "  PYTHON=python3.12 chooses the interpreter that .venv is made with; QUIET= shows pip's output;"
	@echo "  WORKERS=4 shares the tests out to more processes."

setup: $(FULL_STAMP) $(TFLITE214_STAMP) $(WEB) ## Make the venvs with everything that the tests need

demo: $(ALL_STAMP) ## Export the small model that comes along for every target, and ask each
	$(BIN)/needle-export demo --out $(DEMO)

train-demo: $(FULL_STAMP) ## Train the demo model anew, into build/train-demo (42 minutes where it was made)
	$(BIN)/needle-export train-demo --out build/train-demo

test: $(FULL_STAMP) $(TFLITE214_STAMP) $(WEB) ## Run the tests, without those marked slow
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-slow: $(FULL_STAMP) $(TFLITE214_STAMP) $(WEB) ## Run the tests marked slow
	$(BIN)/python -m pytest -m slow

lint: $(FULL_STAMP) ## Check the code with ruff
	$(BIN)/ruff check .

type: $(FULL_STAMP) ## Check the package's types with mypy, strictly
	$(BIN)/mypy

bench: $(FULL_STAMP) ## Measure targets against plain conversions and needle-rs, Core ML builds, and the grammar
	$(BIN)/python -m tests.benchmarks.onnx
	$(BIN)/python -m tests.benchmarks.needle_rs --target onnx,tflite --weights int4
	$(BIN)/python -m tests.benchmarks.tflite --weights fp32,int8
	$(BIN)/python -m tests.benchmarks.coreml --weights fp32,fp16,int4
	$(BIN)/python -m tests.benchmarks.estimates
	$(BIN)/python -m tests.benchmarks.masks

clean: ## Remove build products and caches; .venv stays (remove it with: rm -r .venv)
	rm -rf build .pytest_cache .mypy_cache .ruff_cache needle_export.egg-info
	find needle_export tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	    { echo "needle-export needs Python 3.11 or newer, and '$(PYTHON)' is none: try make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "'$(PYTHON)' has no venv module: install it (on Debian and Ubuntu: the package python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch comes first and alone, so that the build chosen for this machine is in place before anything else asks for one.
$(ALL_STAMP): $(VENV_STAMP) pyproject.toml
	@echo "Installing torch, needle-export and the runtimes of all targets into $(VENV); the first time takes minutes."
	$(PIP) install $(QUIET) 'torch==2.13.0'
	$(PIP) install $(QUIET) -e '.[all]'
	@touch $@

$(FULL_STAMP): $(ALL_STAMP) pyproject.toml
	@echo "Installing what the tests need, the JAX oracle among it."
	$(PIP) install $(QUIET) -e '.[all,test,oracle]'
	@touch $@

# Where there is no npm the file stays away, and this says so each time.
$(WEB): $(FULL_STAMP)
	@$(BIN)/python -m tests.support.web_runtime && { [ ! -f $@ ] || touch $@; }

# Where there is no wheel the stamp stays away, so this says so each time; the tests that need it are skipped.
$(TFLITE214_STAMP):
	@if $(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 12) or sys.platform != "linux")'; then \
	    echo "Installing tflite-runtime 2.14 into $(TFLITE214)."; \
	    $(PYTHON) -m venv $(TFLITE214) && \
	    $(TFLITE214)/bin/python -m pip --disable-pip-version-check install $(QUIET) 'tflite-runtime==2.14.0' 'numpy<2' && \
	    touch $@; \
	else echo "No $(TFLITE214): tflite-runtime 2.14 is for Linux and Python up to 3.11. Its tests will be skipped."; fi
