# Each target sets up what it needs: a virtual environment in .venv, or one line that names the
# package to install.

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PYTEST := $(PY) -m pytest

.PHONY: help demo test test-pythons e2e e2e-newcomer bench soak lint generate clean

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/ready dist/tt-device-plugin.pyz  ## the main job, without hardware and cluster
	@$(PY) -m tests.demo --pyz dist/tt-device-plugin.pyz

test: $(VENV)/ready  ## every test that needs no root
	@$(PYTEST) --numprocesses 2 --dist loadfile

test-pythons: $(VENV)/ready dist/tt-device-plugin.pyz  ## for each Python, or PYTHONS='3.10 3.12'
	@$(PY) -m tests.pythons $(PYTHONS)

e2e: e2e-systemd e2e-pythons e2e-kubelet e2e-cgroup2  ## these; root is needed for each e2e-…

e2e-newcomer: $(VENV)/ready  ## make demo and make test in clean systems, quiet and busy
	@$(PYTEST) -vv tests/e2e/test_newcomer.py

bench: $(VENV)/ready  ## latencies and costs, each beside a bare grpc.aio server's
	@$(PY) -m tests.bench --json dist/bench.json

soak: $(VENV)/ready  ## 10 000 kubelet restarts, at least ten minutes: does anything leak?
	@$(PY) -m tests.soak

lint: $(VENV)/ready  ## ruff, strict mypy, and whether what is generated is what it is made of
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy $(SCRIPTS)
	@$(PY) packaging/build_pyz.py --bootstrap build/lint/_bootstrap
	$(VENV)/bin/mypy build/lint/_bootstrap
	@rm -rf build/generated && mkdir -p build/generated
	@$(call protoc,build/generated)
	@diff -ru -x __pycache__ -x '*.proto' generated build/generated/generated \
		|| { echo 'generated/ is not what its .proto files say; run: make generate'; exit 1; }
	@PYTHONPATH=. $(PY) packaging/options.py --check

# A package only where it is packed.
BOOTSTRAP := $(addprefix packaging/,start.py trees.py extract.py)
SCRIPTS := $(filter-out $(BOOTSTRAP),$(wildcard packaging/*.py))

generate: $(VENV)/ready  ## the protobuf messages and gRPC stubs; what manuals say of the options
	@$(call protoc,.)
	@PYTHONPATH=. $(PY) packaging/options.py

protoc = $(PY) -m grpc_tools.protoc -I. --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) \
	generated/deviceplugin.proto generated/podresources.proto

clean:  ## remove what the targets made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo 'Python 3.10 or newer is needed; name one: make PYTHON=python3.12'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo 'the module venv is missing: apt install python3-venv'; exit 1; }
	@echo 'setting up $(VENV), once: about half a minute'
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/pip install 'pip>=25.1' | $(show-packages)
	@$(VENV)/bin/pip install --group dev | $(show-packages)
	@touch $@

# Of what pip says, a line for each package, so that one sees it live.
show-packages = sed --unbuffered -n -E \
	-e 's/^Collecting ([^ ]+).*/    \1/p' -e 's/^Installing collected packages.*/    installing/p'

include packaging/packaging.mk
