# The package: the zipapp and the .deb, and the tests that both are reproducible and work on real
# systemd.

MACHINE := $(shell dpkg --print-architecture 2>/dev/null)
ARCHES ?= $(MACHINE)
PACKAGE_VERSION := $(shell $(PYTHON) packaging/version.py)
PACKAGED := ttdp.py shiv.toml README.md $(wildcard generated/*.py packaging/*.py)
PACKAGED += $(wildcard packaging/systemd/* packaging/deb/*)
DEB := dist/tt-device-plugin_$(PACKAGE_VERSION)_

# The address of the apt repository, and the key that signs it, as gpg knows it.
REPOSITORY_URL ?= https://packages.tt-device-plugin.invalid/apt
SIGN_KEY ?=
REPOSITORY := dist/repository
RELEASE_CHECKS ?= .ci/run

.PHONY: FORCE deb-tools lock abis reproducible repository release
.PHONY: e2e-systemd e2e-pythons e2e-kubelet e2e-slow e2e-cgroup2 e2e-arm64

pyz: dist/tt-device-plugin.pyz  ## dist/tt-device-plugin.pyz, the zipapp for this machine
	@sha256sum $<

# The zipapp contains the version, so it is built again when only the version has changed.
build/version: FORCE
	@mkdir -p build
	@echo '$(PACKAGE_VERSION)' | cmp -s - $@ || echo '$(PACKAGE_VERSION)' >$@
FORCE:

dist/tt-device-plugin.pyz: $(PACKAGED) build/version | $(VENV)/pyvenv.cfg
	@$(PY) packaging/build_pyz.py

# Without the message the demo would be silent while it fetches grpcio.
$(DEMO): $(PACKAGED) build/version
	@echo 'building the demo, once: about 10 seconds'
	@$(MAKE) --no-print-directory $(VENV)/pyvenv.cfg
	@$(PY) packaging/build_pyz.py --demo --output $@

deb: $(ARCHES:%=$(DEB)%.deb)  ## dist/*.deb, for this machine or ARCHES='amd64 arm64'
	@sha256sum $^

$(DEB)%.deb: $(PACKAGED) | deb-tools $(VENV)/pyvenv.cfg
	@$(PY) packaging/build_deb.py --arch $*

# Checked before the environment is set up.
deb-tools:
	@missing=; \
	for tool in dpkg-buildpackage:dpkg-dev dh:debhelper fakeroot:fakeroot; do \
		command -v $${tool%:*} >/dev/null || missing="$$missing $${tool#*:}"; \
	done; \
	[ -z "$$missing" ] || { \
		echo "make deb needs more: apt install --no-install-recommends$$missing"; exit 1; }

repository: $(addprefix $(DEB),amd64.deb arm64.deb)  ## an apt repository, signed with SIGN_KEY=
	@$(PY) packaging/repository.py --url '$(REPOSITORY_URL)' --sign-key '$(SIGN_KEY)' \
		--output '$(REPOSITORY)' $^

release:  ## VERSION=0.2.0: check everything (RELEASE_CHECKS), tag it, open the next version
	@[ '$(origin VERSION)' = 'command line' ] \
		|| { echo 'name the version: make release VERSION=0.2.0'; exit 1; }
	@$(PYTHON) packaging/release.py '$(VERSION)' --checks '$(RELEASE_CHECKS)'

lock: $(VENV)/pyvenv.cfg  ## update the hashes in shiv.toml, after a change of a version or an ABI
	@$(PY) packaging/build_pyz.py --lock

abis: $(VENV)/pyvenv.cfg  ## check whether PyPI has the pinned grpcio for a newer Python
	@$(PY) packaging/check_abis.py

reproducible: $(VENV)/pyvenv.cfg  ## build twice, at different places and times; compare the bytes
	@$(PY) packaging/check_reproducible.py

e2e-systemd e2e-kubelet e2e-slow e2e-pythons e2e-cgroup2 e2e-arm64: $(VENV)/ready

# The tests that boot systems, but need neither kubelets nor containerd.
SYSTEMD_TESTS := package.py udev.py logind.py repository.py

e2e-systemd: $(DEB)$(MACHINE).deb  ## the package on real systemd: containers, VMs
	@$(PYTEST) -vv $(SYSTEMD_TESTS:%=tests/e2e/test_%)

# Tests with their own targets: they boot systems, and need only the package of this machine.
OTHER_TESTS := newcomer.py pythons.py cgroup2.py arm64.py

e2e-kubelet: dist/tt-device-plugin.pyz $(DEB)$(MACHINE).deb  ## real kubelets, containerd, podman
	@$(PYTEST) -vv --numprocesses 2 --dist loadfile tests/e2e \
		$(patsubst %,--ignore tests/e2e/test_%,$(SYSTEMD_TESTS) $(OTHER_TESTS))

e2e-slow: dist/tt-device-plugin.pyz  ## a container that crashes six minutes after a rename
	@$(PYTEST) -vv -m slow tests/e2e/test_ownership.py

e2e-pythons: $(DEB)$(MACHINE).deb  ## package and tests with Python 3.13 to 3.15
	@$(PYTEST) -vv tests/e2e/test_pythons.py

e2e-cgroup2: $(DEB)$(MACHINE).deb  ## a node of today in a VM: cgroup v2, or CGROUP2=all: older ones
	@$(PYTEST) -vv tests/e2e/test_cgroup2.py

e2e-arm64: $(DEB)arm64.deb  ## the package on arm64: virtual machines with Debian 12 and 13
	@$(PYTEST) -vv tests/e2e/test_arm64.py
