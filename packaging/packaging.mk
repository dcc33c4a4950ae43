# The package: the zipapp and the .deb, and the tests that both are reproducible and work on real
# systemd.

MACHINE := $(shell dpkg --print-architecture 2>/dev/null \
	|| uname -m | sed -e 's/x86_64/amd64/' -e 's/aarch64/arm64/')
ARCHES ?= $(MACHINE)
PACKAGE_VERSION := $(shell $(PYTHON) packaging/version.py)
PACKAGED := ttdp.py shiv.toml README.md CHANGELOG.md $(wildcard generated/*.py packaging/*.py)
PACKAGED += $(wildcard packaging/systemd/* packaging/deb/* packaging/deb/*/*)
DEB := dist/tt-device-plugin_$(PACKAGE_VERSION)_

# The address of the web server for the apt repository, and the key that signs it, as gpg knows it.
REPOSITORY_URL ?=
SIGN_KEY ?=
REPOSITORY := dist/repository
RELEASE_CHECKS ?= .ci/run

.PHONY: FORCE pyz deb deb-tools sbom lock abis reproducible repository repository-ready release
.PHONY: e2e-systemd e2e-pythons e2e-kubelet e2e-cgroup2 e2e-arm64

pyz: dist/tt-device-plugin.pyz  ## build dist/tt-device-plugin.pyz, for this machine
	@$(show-hashes)

show-hashes = for file in $^; do \
	echo "$$file"; echo "    sha256 $$(sha256sum "$$file" | cut -d ' ' -f 1)"; done

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

deb: $(ARCHES:%=$(DEB)%.deb)  ## build dist/*.deb, here or for ARCHES='amd64 arm64'
	@$(show-hashes)

$(DEB)%.deb: $(PACKAGED) | deb-tools $(VENV)/pyvenv.cfg
	@$(PY) packaging/build_deb.py --arch $*

sbom: $(ARCHES:%=$(DEB)%.deb) $(VENV)/ready  ## validate the SBOMs of the packages
	@$(PYTHON) -m venv --without-pip build/sbom
	@$(VENV)/bin/pip --quiet --python build/sbom/bin/python install --group sbom
	@build/sbom/bin/python packaging/check_sbom.py $(ARCHES:%=$(DEB)%.cdx.json)

# Checked before the environment is set up.
DEB_TOOLS := dpkg-buildpackage:dpkg-dev dh:debhelper fakeroot:fakeroot
REPOSITORY_TOOLS := apt-ftparchive:apt-utils gpg:gpg gpg-agent:gpg-agent

deb-tools:
	@$(call require,make deb,$(DEB_TOOLS))

# $(call require,TARGET,TOOL:PACKAGE …): fail with one line if a tool is missing.
require = missing=; for tool in $(2); do \
	command -v $${tool%:*} >/dev/null || missing="$$missing $${tool\#*:}"; done; \
	[ -z "$$missing" ] || { \
		echo "$(1) needs: apt install --no-install-recommends$$missing"; exit 1; }

# Checked before both packages are built.
repository-ready:
	@[ -n '$(REPOSITORY_URL)' ] || { \
		echo 'set the address: make repository REPOSITORY_URL=https://apt.example.org'; exit 1; }
	@$(call require,make repository,$(DEB_TOOLS) $(REPOSITORY_TOOLS))

repository: repository-ready  ## make an apt repository: REPOSITORY_URL=… SIGN_KEY=…
	@$(MAKE) --no-print-directory $(addprefix $(DEB),amd64.deb arm64.deb)
	@$(PY) packaging/repository.py --url '$(REPOSITORY_URL)' --sign-key '$(SIGN_KEY)' \
		--output '$(REPOSITORY)' $(addprefix $(DEB),amd64.deb arm64.deb)

release:  ## check everything and tag a release: VERSION=0.2.0
	@[ '$(origin VERSION)' = 'command line' ] \
		|| { echo 'name the version: make release VERSION=0.2.0'; exit 1; }
	@$(PYTHON) packaging/release.py '$(VERSION)' --checks '$(RELEASE_CHECKS)'

lock: $(VENV)/pyvenv.cfg  ## update the hashes in shiv.toml after another change there
	@$(PY) packaging/build_pyz.py --lock

abis: $(VENV)/pyvenv.cfg  ## look on PyPI for grpcio wheels for newer Pythons
	@$(PY) packaging/check_abis.py

reproducible: $(VENV)/pyvenv.cfg  ## build the packages twice and compare the bytes
	@$(PY) packaging/check_reproducible.py

e2e-systemd e2e-kubelet e2e-pythons e2e-cgroup2 e2e-arm64: $(VENV)/ready

# The tests that boot systems, but need neither kubelets nor containerd.
SYSTEMD_TESTS := package.py udev.py fix.py logind.py repository.py rollout.py node_problems.py

e2e-systemd: $(DEB)$(MACHINE).deb  ## as root: the package in booted Debian systems
	@$(PYTEST) -vv $(SYSTEMD_TESTS:%=tests/e2e/test_%)

# Tests with their own targets: they boot systems, and need only the package of this machine.
OTHER_TESTS := newcomer.py pythons.py cgroup2.py arm64.py

e2e-kubelet: dist/tt-device-plugin.pyz $(DEB)$(MACHINE).deb  ## as root: real kubelets, containerd, podman
	@$(PYTEST) -vv --numprocesses 2 --dist loadfile tests/e2e \
		$(patsubst %,--ignore tests/e2e/test_%,$(SYSTEMD_TESTS) $(OTHER_TESTS))

e2e-pythons: $(DEB)$(MACHINE).deb  ## as root: the package with newer Pythons, or PYTHONS=3.13
	@$(PYTEST) -vv tests/e2e/test_pythons.py -k "$$(echo $(PYTHONS) | sed 's/ / or /g')"

e2e-cgroup2: $(DEB)$(MACHINE).deb  ## as root: a node in a VM (cgroup v2)
	@$(PYTEST) -vv tests/e2e/test_cgroup2.py

e2e-arm64: $(DEB)arm64.deb  ## as root: the package on arm64, in virtual machines
	@$(PYTEST) -vv tests/e2e/test_arm64.py
