# The package: the zipapp and the .deb, and the tests that both are reproducible and work on real
# systemd.

MACHINE := $(shell dpkg --print-architecture 2>/dev/null \
	|| uname -m | sed -e 's/x86_64/amd64/' -e 's/aarch64/arm64/')
ARCHES ?= $(MACHINE)
ALL_ARCHES := amd64 arm64
ABIS := $(shell sed -n '/^abis = /{s/^abis = //; s/[],"[]//g; p}' shiv.toml)
PACKAGE_VERSION := $(shell packaging/version.sh)
# The time of all files in the packages: that of the commit, or without git that of the sources.
COMMITTED := $(shell git -c 'safe.directory=*' log -1 --format=%ct 2>/dev/null)
EPOCH := $(or $(COMMITTED),$(shell date -r CHANGELOG.md +%s))
SOURCES := ttdp.py shiv.toml README.md CHANGELOG.md generated packaging
PACKAGED := $(shell find $(SOURCES) -type f ! -name '*.pyc')
DEB := dist/tt-device-plugin_$(PACKAGE_VERSION)_

# The address of the web server for the apt repository, and the key that signs it, as gpg knows it.
REPOSITORY_URL ?=
SIGN_KEY ?=
REPOSITORY := dist/repository
RELEASE_CHECKS ?= .ci/run

.PHONY: FORCE pyz deb deb-tools sbom lock abis reproducible repository repository-ready release
.PHONY: e2e-systemd e2e-pythons e2e-kubelet e2e-cgroup2 e2e-arm64

pyz: dist/tt-device-plugin.pyz  ## build dist/tt-device-plugin.pyz, for this machine
	@sha256sum $^

# The zipapp contains the version, so it is built again when only the version has changed.
build/version: FORCE
	@mkdir -p build
	@echo '$(PACKAGE_VERSION)' | cmp -s - $@ || echo '$(PACKAGE_VERSION)' >$@
FORCE:

build-pyz = SOURCE_DATE_EPOCH=$(EPOCH) $(PY) packaging/build_pyz.py

$(ALL_ARCHES:%=build/%/tt-device-plugin.pyz): build/%/tt-device-plugin.pyz: \
		$(PACKAGED) build/version | $(VENV)/pyvenv.cfg
	@$(build-pyz) $* '$(PACKAGE_VERSION)' $@

dist/tt-device-plugin.pyz: build/$(MACHINE)/tt-device-plugin.pyz
	@mkdir -p dist && cp $< $@

# Without the message the demo would be silent while it fetches grpcio.
$(DEMO): $(PACKAGED) build/version | $(VENV)/pyvenv.cfg
	@echo 'building the demo, once: about 10 seconds'
	@$(build-pyz) $(MACHINE) '$(PACKAGE_VERSION)' $@ --demo

deb: deb-tools $(ARCHES:%=$(DEB)%.deb)  ## build dist/*.deb, here or for ARCHES='amd64 arm64'
	@sha256sum $(filter %.deb,$^)

# Former packages are removed, so that none of them is installed by mistake; not the repository's.
$(ALL_ARCHES:%=$(DEB)%.deb): $(DEB)%.deb: build/%/tt-device-plugin.pyz $(PACKAGED) | deb-tools
	@SOURCE_DATE_EPOCH=$(EPOCH) $(PY) packaging/sbom.py $* '$(PACKAGE_VERSION)' \
		>build/$*/tt-device-plugin.cdx.json
	@SOURCE_DATE_EPOCH=$(EPOCH) packaging/build-deb.sh $* '$(PACKAGE_VERSION)' build/$*
	@mkdir -p dist
	@find dist -maxdepth 1 -name 'tt-device-plugin_*' ! -name '*_$(PACKAGE_VERSION)_*' -delete
	@cp build/$*/tt-device-plugin.cdx.json $(@:.deb=.cdx.json)
	@cp build/$*/$(@F) $@

sbom: $(ARCHES:%=$(DEB)%.deb) $(VENV)/ready
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
	@$(call require,make repository,$(DEB_TOOLS) $(REPOSITORY_TOOLS))
	@[ -n '$(REPOSITORY_URL)' ] || { \
		echo 'set the address: make repository REPOSITORY_URL=https://apt.example.org'; exit 1; }
	@[ -n '$(SIGN_KEY)' ] || { \
		echo 'set the key: make repository SIGN_KEY=FINGERPRINT, of gpg --list-secret-keys'; exit 1; }
	@gpg --list-secret-keys '$(SIGN_KEY)' >/dev/null 2>&1 || { \
		echo 'gpg has no secret key $(SIGN_KEY); run: gpg --list-secret-keys'; exit 1; }

repository: repository-ready  ## make an apt repository: REPOSITORY_URL=… SIGN_KEY=…
	@$(MAKE) --no-print-directory deb ARCHES='$(ALL_ARCHES)'
	@packaging/repository.sh '$(REPOSITORY_URL)' '$(SIGN_KEY)' '$(REPOSITORY)' \
		$(ALL_ARCHES:%=$(DEB)%.deb)

release:
	@packaging/release.sh '$(VERSION)' '$(RELEASE_CHECKS)'

lock: $(VENV)/pyvenv.cfg
	@$(PY) packaging/build_pyz.py --lock

abis: $(VENV)/pyvenv.cfg
	@$(PY) packaging/build_pyz.py --newer

# Two builds of this version, which differ in the path of the sources, in their times, and in umask,
# time zone, locale, home and hash seed. The second one has no cache of pip.
ONE := build/reproducible/one
TWO := build/reproducible/somewhere/else
again = env -u MAKEFLAGS $(MAKE) --silent -C $(1) pyz deb PACKAGE_VERSION='$(PACKAGE_VERSION)' \
	EPOCH=$(EPOCH) VENV='$(abspath $(VENV))' >$(1).log || { cat $(1).log; exit 1; }

reproducible: $(VENV)/pyvenv.cfg
	@rm -rf build/reproducible
	@mkdir -p $(ONE) $(TWO)
	@cp -r Makefile $(SOURCES) $(ONE)
	@cp -r Makefile $(SOURCES) $(TWO)
	@find $(ONE) -exec touch -d 2001-09-09 {} +
	@umask 022; export TZ=UTC LC_ALL=C; $(call again,$(ONE))
	@umask 077; export TZ=Pacific/Auckland LC_ALL=C.UTF-8 HOME=/nonexistent PYTHONHASHSEED=42; \
		$(call again,$(TWO))
	@cd $(ONE)/dist && for file in *; do \
		cmp $$file $(CURDIR)/$(TWO)/dist/$$file || exit; echo "same: $$file"; done

e2e-systemd e2e-kubelet e2e-pythons e2e-cgroup2 e2e-arm64: $(VENV)/ready

# The tests that boot systems, but need neither kubelets nor containerd.
SYSTEMD_TESTS := package.py driver.py repository.py

# The package in booted Debian systems.
e2e-systemd: $(DEB)$(MACHINE).deb
	@$(PYTEST) -vv --numprocesses 2 --dist loadfile $(SYSTEMD_TESTS:%=tests/e2e/test_%)

# Tests with their own targets: they boot systems, and need only the package of this machine.
OTHER_TESTS := newcomer.py pythons.py cgroup2.py arm64.py

# Real kubelets, containerd and podman.
e2e-kubelet: dist/tt-device-plugin.pyz $(DEB)$(MACHINE).deb
	@$(PYTEST) -vv --numprocesses 2 --dist loadfile tests/e2e \
		$(patsubst %,--ignore tests/e2e/test_%,$(SYSTEMD_TESTS) $(OTHER_TESTS))

# The package with newer Pythons, or PYTHONS='3.13 3.14'.
e2e-pythons: $(DEB)$(MACHINE).deb
	@$(PYTEST) -vv tests/e2e/test_pythons.py -k "$$(echo $(PYTHONS) | sed 's/ / or /g')"

# A node in a virtual machine, with cgroup v2.
e2e-cgroup2: $(DEB)$(MACHINE).deb
	@$(PYTEST) -vv tests/e2e/test_cgroup2.py

# The arm64 package's program, in an emulated process.
e2e-arm64: $(DEB)arm64.deb
	@$(PYTEST) -vv tests/e2e/test_arm64.py
