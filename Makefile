# Each target sets up what it needs: a virtual environment in .venv, or one line that names the
# missing package. `make help` shows what a user needs; CONTRIBUTING.md has the other targets.

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PYTEST := $(PY) -m pytest
DEMO := build/demo/tt-device-plugin.pyz

# A target whose commands have failed is made again.
.DELETE_ON_ERROR:
.PHONY: help demo test test-pythons e2e e2e-newcomer bench soak lint generate clean

help:  ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# It needs neither the packages of the tests nor other Pythons: the demo's modules are those that
# were packed.
demo: $(DEMO)  ## show the main job, without hardware or cluster
	@PYTHONPATH=build/demo/site-packages $(PY) -m tests.demo --pyz $(DEMO)

test: $(VENV)/ready  ## run all tests that need no root: about two minutes
	@$(PYTEST) --numprocesses 3 --dist loadfile

# All tests, and the zipapp, with each Python of this machine; or PYTHONS='3.10 3.12'.
test-pythons: dist/tt-device-plugin.pyz
	@for version in $(or $(PYTHONS),$(ABIS:cp3%=3.%)); do \
		bin=$$(ls -d ~/.pyenv/versions/$$version.*/bin 2>/dev/null | tail -n 1); \
		python=$$(PATH="$$bin:$$PATH" python$$version -c 'import sys; print(sys.executable)' \
			2>/dev/null) || { echo "NOT RUN: Python $$version is not on this machine"; continue; }; \
		echo "Python $$version"; \
		venv=build/python-$$version; \
		$(MAKE) --no-print-directory test PYTHON="$$python" VENV=$$venv || exit; \
		$$venv/bin/python -I -S $< --version || exit; \
		$$venv/bin/python -m tests.demo --pyz $< >$$venv/demo || { cat $$venv/demo; exit 1; }; \
	done

e2e: e2e-systemd e2e-pythons e2e-kubelet e2e-cgroup2  ## as root: test on real systems

e2e-newcomer: $(VENV)/ready
	@$(PYTEST) -vv tests/e2e/test_newcomer.py

bench: $(VENV)/ready  ## measure latencies and costs, beside a bare gRPC server
	@$(PY) -m tests.bench

soak: $(VENV)/ready
	@$(PY) -m tests.bench soak

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy packaging/*.py
	@rm -rf build/generated && mkdir -p build/generated
	@$(call protoc,build/generated)
	@diff -ru -x __pycache__ -x '*.proto' generated build/generated/generated \
		|| { echo 'run make generate: generated/ does not match its .proto files'; exit 1; }
	@PYTHONPATH=. $(PY) packaging/options.py --check

generate: $(VENV)/ready
	@$(call protoc,.)
	@PYTHONPATH=. $(PY) packaging/options.py

protoc = $(PY) -m grpc_tools.protoc -I. --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) \
	generated/deviceplugin.proto

clean:  ## delete all files that these targets make
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# An environment that can build the zipapp. Only Python 3.10 needs a package for that.
$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo 'this needs: apt install --no-install-recommends python3-venv'; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo 'Python 3.10 or later is required: make PYTHON=python3.12'; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(call pip,"tomli==2.5.0; python_version<'3.11'")

$(VENV)/ready: pyproject.toml | $(VENV)/pyvenv.cfg
	@echo 'setting up $(VENV), once: about half a minute'
	@$(call pip,'pip>=25.1')
	@$(call pip,--group dev)
	@touch $@

# $(call pip,ARGUMENT …): install packages of PyPI. pip itself says why it cannot.
pip = $(VENV)/bin/pip --disable-pip-version-check --quiet install $(1) \
	|| { echo 'pip cannot fetch the Python packages; is there a network?'; exit 1; }

include packaging/packaging.mk
