# `make` alone lists the targets. Each does its own set-up: a .venv with pinned requirements, the package, its native part.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv
PY := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
# Quiet where nobody watches; a progress bar where somebody does (the first set-up downloads gigabytes).
PIP := $(PY) -m pip --disable-pip-version-check install $(if $(CI),-qq --progress-bar off)
# Tests run side by side; those that start SGLang stay together on one of the processes. The fast ones wait for processes
# half of their time, so one more of them runs than there are CPUs.
PYTEST := $(PY) -m pytest -n logical --maxprocesses 8 --durations 20
# More arguments for the command behind a target: make test ARGS="-k ring -x"
ARGS ?=

NATIVE := $(sort $(wildcard native/*.h native/*.cpp))
SANITIZED := $(sort $(wildcard native/tests/*.cpp))
CRASH := $(sort $(wildcard native/crash/*.h native/crash/*.cpp))
CXX_FILES = $(NATIVE) $(SANITIZED) $(CRASH)

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo '  More arguments for the command behind a target: ARGS="..."'

.PHONY: demo
demo: setup ## Two SGLang workers on the CPU and a GRPO trainer: it learns, and shows it (at most 6 minutes)
	@$(VENV)/bin/mprollout demo $(ARGS)

.PHONY: demo-controls
demo-controls: setup ## The demo's controls, which must not learn: shuffled rewards, updates switched off
	@$(VENV)/bin/mprollout demo-controls $(ARGS)

.PHONY: test
test: setup ## Everything but what needs a GPU or hours; real SGLang included
	$(PYTEST) -m "not gpu and not long" $(ARGS)

.PHONY: test-fast
test-fast: setup ## The tests that start no SGLang and fill no core (2 minutes)
	$(PY) -m pytest -n $(shell nproc | awk '{ print $$1 < 8 ? $$1 + 1 : 8 }') -m "not slow and not gpu and not long" $(ARGS)

.PHONY: lint
lint: $(STAMPS)/requirements ## ruff (rules and format) and clang-format, changing nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(if $(CXX_FILES),$(VENV)/bin/clang-format --dry-run --Werror $(CXX_FILES))

.PHONY: format
format: $(STAMPS)/requirements ## Rewrite the files as `make lint` wants them
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(if $(CXX_FILES),$(VENV)/bin/clang-format -i $(CXX_FILES))

.PHONY: types
types: setup ## mypy strict, and the stub of the native part against the native part
	$(PY) -m mypy
	$(PY) -m mypy.stubtest mprollout._native --mypy-config-file setup.cfg

# ---- sanitizers: each native/tests/*.cpp is a program of its own

SAN_CXX := g++ -std=c++20 -O1 -g -fno-omit-frame-pointer -Wall -Wextra -Inative -pthread
SAN_THREAD := $(SANITIZED:native/tests/%.cpp=build/sanitize/%.tsan)
SAN_ADDRESS := $(SANITIZED:native/tests/%.cpp=build/sanitize/%.asan)
# gcc 12's TSan cannot place its shadow under the address randomisation of new kernels.
NO_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)

build/sanitize/%.tsan: native/tests/%.cpp $(NATIVE)
	@mkdir -p $(@D)
	$(SAN_CXX) -fsanitize=thread $< -o $@
build/sanitize/%.asan: native/tests/%.cpp $(NATIVE)
	@mkdir -p $(@D)
	$(SAN_CXX) -fsanitize=address,undefined -fno-sanitize-recover=all $< -o $@

.PHONY: sanitize
sanitize: $(SAN_THREAD) $(SAN_ADDRESS) ## native/tests under ThreadSanitizer, then under Address- and UndefinedBehaviorSanitizer
	@test -n "$(SANITIZED)" || { echo "make sanitize: native/tests holds no program"; exit 1; }
	@for program in $(SAN_THREAD) $(SAN_ADDRESS); do \
	    echo "== $$program"; \
	    TSAN_OPTIONS=halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 $(NO_ASLR) ./$$program; \
	done; echo "sanitize: $(words $(SAN_THREAD) $(SAN_ADDRESS)) programs passed"

# Beside the real one: the package's files linked, and an extension of its own. CPython keeps much for ever on
# purpose, so leaks are not looked for; libstdc++ is preloaded, too, for ASan to meet its exceptions. A limit on
# addresses leaves ASan none.
# -P: this folder's mprollout must not come first.
ASAN_PYTHON := build/python-asan
.PHONY: sanitize-python
sanitize-python: setup ## The native part's Python tests under Address- and UndefinedBehaviorSanitizer (4 minutes)
	@rm -rf $(ASAN_PYTHON)/mprollout && mkdir -p $(ASAN_PYTHON)/mprollout
	@ln -s $(abspath $(filter-out %.so %/__pycache__,$(wildcard mprollout/*))) $(ASAN_PYTHON)/mprollout/
	MPROLLOUT_SANITIZE=1 $(PY) setup.py -q build_ext --build-temp $(ASAN_PYTHON)/temp --build-lib $(ASAN_PYTHON)
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" PYTHONMALLOC=malloc \
	    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=$(abspath $(ASAN_PYTHON)) \
	    $(PY) -P -m pytest -m "not long and not gpu" -k "not want_of_memory" -q \
	    $(patsubst %,tests/test_native_%.py,claims payload leases deaths segment waits layout) \
	    tests/test_ring_machine.py tests/test_batch.py $(ARGS)

.PHONY: fuzz
fuzz: build/sanitize/attach_fuzz.asan ## A million corrupt segments under ASan, UBSan (5 minutes; ARGS="INPUTS FIRST")
	@UBSAN_OPTIONS=print_stacktrace=1 ./$< $(or $(ARGS),1000000)

# Without sanitizers: it single-steps processes, whose every load TSan would turn into hundreds of instructions.
build/crash/crash_points: native/crash/crash_points.cpp $(CRASH) $(NATIVE)
	@mkdir -p $(@D)
	g++ -std=c++20 -O1 -g -Wall -Wextra -Inative -pthread $< -o $@

.PHONY: crash
crash: build/crash/crash_points ## Kill and stop processes at every step of the ring (1 minute; ARGS=--all: every instruction)
	@./$< $(ARGS)

.PHONY: model
model: ## Check the ring's spin model, and that each mutation of it fails (2 minutes; ARGS=--long: the large bounds)
	@python3 native/model/check.py $(ARGS)

.PHONY: bench
bench: setup $(STAMPS)/bench ## The ring beside its rivals (10 minutes, an idle machine): ratios, build/bench.json, build/bench.png
	@mkdir -p build
	@failed=0; \
	$(PY) -m pytest bench -q --benchmark-quiet --benchmark-json=build/bench.json $(ARGS) || failed=1; \
	$(PY) bench/report.py build/bench.json build/bench.png || failed=1; \
	exit $$failed

# A rival that cannot be installed is skipped, with its reason in the table.
$(STAMPS)/bench: $(STAMPS)/requirements requirements/bench.txt
	@echo "make: installing the rivals of the ring"
	@$(PIP) --constraint requirements/cpu.txt --constraint requirements/dev.txt --requirement requirements/bench.txt \
	    && touch $@ || echo "make: not all of requirements/bench.txt could be installed"

.PHONY: clean
clean: ## Remove what was built and cached; the .venv stays
	rm -rf build dist *.egg-info mprollout/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	rm -f $(STAMPS)/package
	find mprollout tests bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

.PHONY: distclean
distclean: clean ## clean, and remove the .venv
	rm -rf $(VENV)

# ---- set-up, by stamps: a step runs again when what it read has changed

.PHONY: setup
setup: $(STAMPS)/package ## Only the set-up: .venv, requirements, native build

# A tree that was moved or copied needs a new .venv: its scripts name the old place.
ifneq ($(shell cat $(STAMPS)/venv 2>/dev/null),$(CURDIR))
$(STAMPS)/venv: FORCE
endif
.PHONY: FORCE
FORCE:

$(STAMPS)/venv:
	@python=; for name in $(PYTHON) python3.11 python3; do \
	    if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "mprollout needs Python 3.11 or newer; neither python3.11 nor python3 is that (python3: $$(python3 --version 2>&1 || true))."; \
	    echo "On Debian 12: apt install python3 python3-venv python3-dev; or name one: make PYTHON=/path/to/python3.11"; exit 1; \
	fi; \
	version=$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	    echo "$$python cannot make a virtual environment. On Debian: apt install python$$version-venv"; exit 1; \
	fi; \
	if ! "$$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'; then \
	    echo "$$python has no C headers (Python.h), which the native part needs. On Debian: apt install python$$version-dev"; exit 1; \
	fi; \
	if ! command -v g++ >/dev/null; then \
	    echo "g++ is missing, which the native part needs. On Debian: apt install g++"; exit 1; \
	fi; \
	if $(PY) -c '' 2>/dev/null && grep -qF "$(CURDIR)/$(VENV)" $(VENV)/bin/activate; then :; else \
	    echo "make: a new $(VENV) with $$("$$python" --version)"; "$$python" -m venv --clear $(VENV); \
	fi
	@mkdir -p $(STAMPS)
	@echo "$(CURDIR)" > $@

$(STAMPS)/requirements: $(STAMPS)/venv $(wildcard requirements/*.txt)
	@echo "make: installing the pinned requirements (2.6 GB on disk, some minutes, once)"
	@$(PIP) --constraint requirements/dev.txt pip
	@$(PIP) --requirement requirements/cpu.txt --requirement requirements/dev.txt
	@$(PIP) --no-deps --requirement requirements/cpu-nodeps.txt
	@touch $@

$(STAMPS)/package: $(STAMPS)/requirements $(wildcard setup.py setup.cfg pyproject.toml) $(NATIVE)
	@echo "make: building the native part"
	@$(PIP) --no-build-isolation --no-deps --editable . > $(STAMPS)/package.log 2>&1 || { cat $(STAMPS)/package.log; exit 1; }
	@touch $@
