# The package: the zipapp, the .deb, and the proof that both come out the same everywhere and work on real systemd.

MACHINE := $(shell dpkg --print-architecture 2>/dev/null)
ARCHES ?= $(MACHINE)
PACKAGE_VERSION := $(shell $(PYTHON) packaging/version.py)
PACKAGED := ttdp.py shiv.toml $(wildcard generated/*.py packaging/*.py packaging/systemd/* packaging/deb/*)
DEB := dist/tt-device-plugin_$(PACKAGE_VERSION)_

.PHONY: FORCE deb-tools lock reproducible e2e-systemd

pyz: dist/tt-device-plugin.pyz  ## the zipapp dist/tt-device-plugin.pyz, for this machine
	@sha256sum $<

# The version is in the zipapp, whatever the time of the last commit.
build/version: FORCE
	@mkdir -p build
	@echo '$(PACKAGE_VERSION)' | cmp -s - $@ || echo '$(PACKAGE_VERSION)' >$@
FORCE:

dist/tt-device-plugin.pyz: $(PACKAGED) build/version | $(VENV)/ready
	@$(PY) packaging/build_pyz.py

deb: $(ARCHES:%=$(DEB)%.deb)  ## dist/tt-device-plugin_<version>_<arch>.deb, for this machine or ARCHES='amd64 arm64'
	@sha256sum $^

$(DEB)%.deb: $(PACKAGED) | deb-tools $(VENV)/ready
	@$(PY) packaging/build_deb.py --arch $*

# Before anything is set up.
deb-tools:
	@missing=; \
	for tool in dpkg-buildpackage:dpkg-dev dh:debhelper fakeroot:fakeroot; do \
		command -v $${tool%:*} >/dev/null || missing="$$missing $${tool#*:}"; \
	done; \
	[ -z "$$missing" ] || { echo "make deb needs more: apt install --no-install-recommends$$missing"; exit 1; }

lock: $(VENV)/ready  ## write the hashes in shiv.toml anew, after a change of a version or an ABI
	@$(PY) packaging/build_pyz.py --lock

reproducible: $(VENV)/ready  ## build everything twice, at different places and times: the same bytes?
	@$(PY) packaging/check_reproducible.py

e2e-systemd: $(DEB)$(MACHINE).deb
	@$(PYTEST) -vv tests/e2e/test_package.py tests/e2e/test_udev.py

e2e-kubelet: $(DEB)$(MACHINE).deb  # for the test with its unit
