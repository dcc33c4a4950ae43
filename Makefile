# Each target sets up what it needs: a virtual environment in .venv, or one line that names the
# missing package.

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PYTEST := $(PY) -m pytest
DEMO := build/demo/tt-device-plugin.pyz

# A target whose commands have failed is made again.
.DELETE_ON_ERROR:
.PHONY: help demo test test-pythons e2e e2e-newcomer bench fuzz soak lint generate clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# It needs neither the packages of the tests nor other Pythons: the demo's modules are those that
# were packed.
demo: $(DEMO)  ## show the main job, without hardware or cluster
	@PYTHONPATH=build/site-packages/demo $(PY) -m tests.demo --pyz $(DEMO)

test: $(VENV)/ready  ## run all tests that need no root: about two minutes
	@$(PYTEST) --numprocesses 3 --dist loadfile

test-pythons: $(VENV)/ready dist/tt-device-plugin.pyz  ## run tests under each Python, or PYTHONS='3.10 3.12'
	@$(PY) -m tests.pythons $(PYTHONS)

e2e: e2e-systemd e2e-pythons e2e-kubelet e2e-cgroup2  ## as root: run e2e-systemd, -pythons, -kubelet, -cgroup2

e2e-newcomer: $(VENV)/ready  ## as root: make demo and make test in a clean system
	@$(PYTEST) -vv tests/e2e/test_newcomer.py

bench: $(VENV)/ready  ## measure latencies and costs, beside a bare gRPC server
	@$(PY) -m tests.bench --json dist/bench.json

fuzz: $(VENV)/ready  ## try random operations for SECONDS=600, from SEED=1
	@$(PY) -m tests.fuzz --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1)

soak: $(VENV)/ready  ## search for leaks: 10,000 kubelet restarts in ten minutes
	@$(PY) -m tests.soak

lint: $(VENV)/ready  ## run ruff and strict mypy, and check generated files
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy $(SCRIPTS)
	@$(PY) packaging/build_pyz.py --bootstrap build/lint/_bootstrap
	$(VENV)/bin/mypy build/lint/_bootstrap
	@rm -rf build/generated && mkdir -p build/generated
	@$(call protoc,build/generated)
	@diff -ru -x __pycache__ -x '*.proto' generated build/generated/generated \
		|| { echo 'run make generate: generated/ does not match its .proto files'; exit 1; }
	@PYTHONPATH=. $(PY) packaging/options.py --check

# These form a Python package only in the zipapp.
BOOTSTRAP := $(addprefix packaging/,start.py trees.py extract.py)
SCRIPTS := $(filter-out $(BOOTSTRAP),$(wildcard packaging/*.py))

generate: $(VENV)/ready  ## generate gRPC stubs, and the options in the manuals
	@$(call protoc,.)
	@PYTHONPATH=. $(PY) packaging/options.py

protoc = $(PY) -m grpc_tools.protoc -I. --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) \
	generated/deviceplugin.proto generated/podresources.proto

clean:  ## delete all files that these targets make
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# An environment that can build the zipapp. Only Python 3.10 needs a package for that.
$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo 'Python 3.10 or later is required: make PYTHON=python3.12'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo 'the module venv is missing: apt install python3-venv'; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(call pip,tomli,--quiet "tomli==2.5.0; python_version<'3.11'")

$(VENV)/ready: pyproject.toml | $(VENV)/pyvenv.cfg
	@echo 'setting up $(VENV), once: about half a minute'
	@$(call pip,pip,'pip>=25.1')
	@$(call pip,the packages of the tests,--group dev)
	@touch $@

# $(call pip,WHAT,ARGUMENT …): install packages; if pip cannot fetch them, explain it in two lines.
pip = mkdir -p build && { \
	$(VENV)/bin/pip --disable-pip-version-check install $(2) 2>build/pip.log | $(show-packages) \
		|| { $(PYTHON) packaging/offline.py '$(1)' build/pip.log; exit 1; }; }

# Prints one line of pip's output for each package, at once.
show-packages = sed --unbuffered -n -E \
	-e 's/^Collecting ([^ ]+).*/    \1/p' -e 's/^Installing collected packages.*/    installing/p'

include packaging/packaging.mk
