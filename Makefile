# `make help` lists the targets.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-all cpp-tests python-tests lint format ratios releases releases-short cuda-build venv clean

VENV ?= .venv
CUDA_VENV ?= .venv-cuda
BUILD ?= build
# Every extra in one environment, so that no target waits for another one's packages.
EXTRAS := demo,test,lint
CUDA_TORCH ?= torch==2.14.1
DEMO_ARGS ?=
PYTEST_ARGS ?=
RELEASES_ARGS ?=

override VENV := $(abspath $(VENV))
override CUDA_VENV := $(abspath $(CUDA_VENV))
override BUILD := $(abspath $(BUILD))
BIN := $(VENV)/bin
RESULTS := $(BUILD)/test-results
# Ranks share the cores; more threads than cores only wait for one another.
export OMP_NUM_THREADS ?= 1
export PYTHON TORCH

help:
	@echo 'make demo         train a small BERT twice, stock and with z3ext, and compare (demo.png)'
	@echo 'make test         C++ tests, then pytest: every kind of test, about 6 minutes on two cores'
	@echo 'make test-all     the same with every training case at every world size: about 20 minutes'
	@echo 'make cpp-tests    the C++ tests alone (needs cmake, a C++20 compiler and GoogleTest)'
	@echo 'make python-tests pytest alone'
	@echo 'make lint         ruff, mypy and clang-format, changing nothing'
	@echo 'make format       let ruff and clang-format rewrite the sources'
	@echo 'make releases     train with every release of DeepSpeed: docs/releases.md, about 2 hours'
	@echo 'make releases-short a few cases with one release per family, about 4 minutes'
	@echo 'make ratios       kernel times against stock, as a markdown table'
	@echo 'make cuda-build   compile, link and import the CUDA library (needs nvcc, no GPU)'
	@echo 'make venv         only make or update the virtual environment'
	@echo 'make clean        remove build results; the environments stay'
	@echo
	@echo 'VENV=folder       the virtual environment; $(VENV)'
	@echo 'PYTHON=program    makes the environment; python3'
	@echo 'TORCH=requirement what pip installs as torch; torch 2.13.0, for the CPU if there is no GPU'
	@echo 'DEMO_ARGS=...     options of python -m z3ext.demo, such as --steps 20'
	@echo 'PYTEST_ARGS=...   options of pytest, such as -k pack'

# Every target runs in a folder or by a script outside the checkout's root, so that Python imports
# the installed z3ext and not the folder of that name.
demo:
	@bash scripts/make_venv.sh '$(VENV)' demo
	@cd '$(VENV)' && bin/python -m z3ext.demo --output '$(CURDIR)/demo.png' $(DEMO_ARGS)

venv:
	@bash scripts/make_venv.sh '$(VENV)' '$(EXTRAS)'

test: cpp-tests python-tests

# tests/training/selection.py says which cases the part without Z3EXT_TEST_ALL has.
test-all: export Z3EXT_TEST_ALL := 1
test-all:
	@echo 'make test-all: about 20 minutes on two cores. Over make test it has every training case at'
	@echo 'every world size and on every reduction path, where make test takes a part of these pairs;'
	@echo 'the library built by CMake too; and an installation that compiles all of it beforehand.'
	@$(MAKE) --no-print-directory cpp-tests python-tests

# The library itself is compiled with the same flags at its first use; tests/build reads that log.
cpp-tests: venv
	@if ! command -v cmake >/dev/null; then \
	  echo 'C++ TESTS NOT RUN: there is no cmake (Debian: apt-get install cmake libgtest-dev)'; \
	elif ! echo '#include <gtest/gtest.h>' | $(CXX) -E -x c++ - >/dev/null 2>&1; then \
	  echo 'C++ TESTS NOT RUN: $(CXX) finds no GoogleTest (Debian: apt-get install libgtest-dev)'; \
	else \
	  mkdir -p '$(RESULTS)'; \
	  cmake -S . -B '$(BUILD)/cmake' -DZ3EXT_WERROR=ON -DPython3_EXECUTABLE='$(BIN)/python'; \
	  cmake --build '$(BUILD)/cmake' --parallel 2 $(if $(Z3EXT_TEST_ALL),,--target kernel_tests); \
	  ctest --test-dir '$(BUILD)/cmake' --output-on-failure --output-junit '$(RESULTS)/ctest.xml'; \
	fi

# Two tests at a time, then those that must have the cores for themselves. 5: PYTEST_ARGS selects none.
# The first training test of a world size runs that size's whole matrix, so one limit fits all.
PYTEST = '$(BIN)/pytest' tests --timeout=1800

python-tests: venv
	@mkdir -p '$(RESULTS)'
	@status=0; \
	$(PYTEST) -n 2 --dist worksteal -m 'not alone' --junit-xml='$(RESULTS)/pytest.xml' $(PYTEST_ARGS) \
	  || status=$$?; \
	alone=0; \
	$(PYTEST) -m alone --junit-xml='$(RESULTS)/pytest-alone.xml' $(PYTEST_ARGS) || alone=$$?; \
	((status == 5)) && status=$$alone; \
	((alone == 5)) && alone=0; \
	exit $$((status ? status : alone))

CPP_FILES = $(shell find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h')

lint: venv
	'$(BIN)/ruff' check .
	'$(BIN)/ruff' format --check .
	'$(BIN)/mypy'
	'$(BIN)/clang-format' --dry-run --Werror $(CPP_FILES)

format: venv
	'$(BIN)/ruff' check --fix .
	'$(BIN)/ruff' format .
	'$(BIN)/clang-format' -i $(CPP_FILES)

# Goes on where it was interrupted: build/releases keeps the releases and the results.
releases: venv
	@'$(BIN)/python' scripts/releases.py --cache '$(BUILD)/releases' $(RELEASES_ARGS)

releases-short: venv
	@'$(BIN)/python' scripts/releases.py --cache '$(BUILD)/releases' --short $(RELEASES_ARGS)

ratios: venv
	@'$(BIN)/python' scripts/ratios.py

cuda-build:
	@command -v nvcc >/dev/null || { echo 'make cuda-build: there is no nvcc on PATH'; exit 1; }
	@TORCH='$(CUDA_TORCH)' bash scripts/make_venv.sh '$(CUDA_VENV)' '' pytest pytest-timeout
	@mkdir -p '$(RESULTS)'
	@Z3EXT_REQUIRE_CUDA_BUILD=1 '$(CUDA_VENV)/bin/pytest' tests/cuda_build \
	  --junit-xml='$(RESULTS)/cuda-build.xml' $(PYTEST_ARGS)

clean:
	rm -rf '$(BUILD)' demo.png
