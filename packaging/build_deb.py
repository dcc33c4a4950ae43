#!/usr/bin/env python3
"""Builds dist/tt-device-plugin_<version>_<arch>.deb from packaging/deb with dpkg-buildpackage.

Beside it is the package's SBOM, in CycloneDX's JSON. Then it runs lintian. Nothing is compiled, so
any machine can build for any architecture. The version is that of version.py.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import build_pyz
import sbom
from build_pyz import BUILD, TOP

# Files of packaging/deb that are installed, with their paths in the source package. The other files
# of packaging/deb are its debian/.
BESIDE = {
    "tt-device-plugin": "bin/tt-device-plugin",
    "back-off": "back-off",
    "config.toml": "config.toml",
    "config-at-first.toml": "config-at-first.toml",
    "completion.bash": "completions/tt-device-plugin",
    "tt-device-plugin.8": "tt-device-plugin.8",
    "tt-device-plugin.toml.5": "tt-device-plugin.toml.5",
}
SBOM = "tt-device-plugin.cdx.json"
FOR_DEBHELPER = {
    "tt-device-plugin.service": "tt-device-plugin.service",
    "tt-device-plugin-metrics.socket": "tt-device-plugin-metrics.socket",
    "tmpfiles.conf": "tt-device-plugin.tmpfiles",
}

# Nodes with a kubelet run systemd. This is not an override in the package: Debian 13's lintian no
# longer has the tag, and takes an override of it for an error.
NO_INIT_SCRIPT = "package-supports-alternative-init-but-no-init.d-script"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Builds the Debian package.")
    here = build_pyz.MACHINES.get(os.uname().machine)
    parser.add_argument("--arch", default=here, help="default: this machine's")
    parser.add_argument("--output", type=Path, default=TOP / "dist", help="default: %(default)s")
    parser.add_argument("--version", help="default: the version of version.py")
    parser.add_argument("--no-lintian", action="store_true", help="do not run lintian")
    options = parser.parse_args()
    version = options.version or build_pyz.package_version()
    os.environ["SOURCE_DATE_EPOCH"] = str(build_pyz.source_date_epoch())
    top = BUILD / "deb" / options.arch
    lay_out_source(top / "source", options.arch, version)
    build_zipapp(top / "source", options.arch, version)
    build_package(top, options.arch)
    package = top / f"tt-device-plugin_{version}_{options.arch}.deb"
    if not options.no_lintian:
        run_lintian(package)
    options.output.mkdir(parents=True, exist_ok=True)
    result = options.output / package.name
    shutil.copy(package, result)
    shutil.copy(top / "source" / SBOM, result.with_suffix(".cdx.json"))
    print(f"{build_pyz.shown(result)}: {result.stat().st_size / 1e6:.1f} MB")
    return 0


def lay_out_source(source: Path, arch: str, version: str) -> None:
    """Make the directory of the source package, without the zipapp."""
    shutil.rmtree(source.parent, ignore_errors=True)
    ignore = shutil.ignore_patterns(*BESIDE)
    shutil.copytree(TOP / "packaging/deb", source / "debian", ignore=ignore)
    for name, place in BESIDE.items():
        (source / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TOP / "packaging/deb" / name, source / place)
    for script in ("bin/tt-device-plugin", "back-off"):
        (source / script).chmod(0o755)
    for name in ("README.md", "CHANGELOG.md"):
        shutil.copy(TOP / name, source)
    shutil.copytree(TOP / "packaging/systemd", source / "systemd")
    for name, place in FOR_DEBHELPER.items():
        (source / "systemd" / name).rename(source / "debian" / place)
    text = sbom.text(arch, version, build_pyz.source_date_epoch())
    (source / SBOM).write_text(text)
    set_version(source / "debian", version)
    # dpkg lowers later times to this one, but keeps earlier ones, which differ between checkouts.
    epoch = build_pyz.source_date_epoch()
    for path in source.rglob("*"):
        os.utime(path, (epoch, epoch))


def build_zipapp(source: Path, arch: str, version: str) -> None:
    """Put the zipapp into the source package's directory."""
    script = str(TOP / "packaging/build_pyz.py")
    output = str(source / "tt-device-plugin.pyz")
    arguments = ["--arch", arch, "--version", version, "--output", output]
    if status := subprocess.run([sys.executable, script, *arguments]).returncode:
        sys.exit(status)  # build_pyz.py has printed the reason


def build_package(top: Path, arch: str) -> None:
    """Run dpkg-buildpackage; print its output if it fails."""
    print("dpkg-buildpackage", flush=True)
    log = top / "build.log"
    # make has checked for the tools; dpkg-buildpackage would also require compilers.
    options = ["--build=binary", "--no-sign", "--no-check-builddeps", "--host-arch", arch]
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "DEB_BUILD_OPTIONS": "nocheck"}
    with log.open("w") as lines:
        built = subprocess.run(
            ["dpkg-buildpackage", *options],
            cwd=top / "source",
            env=environment,
            stdout=lines,
            stderr=subprocess.STDOUT,
        )
    if built.returncode:
        sys.exit(f"{log.read_text()}\ndpkg-buildpackage failed")


def run_lintian(package: Path) -> None:
    """Run lintian, and exit if it finds anything. Print a line if it is not installed."""
    if not shutil.which("lintian"):
        print("lintian is not installed: skipped these checks, which are for maintainers")
        return
    print("lintian", flush=True)
    checks = ["--fail-on", "error,warning,info", "--display-info", "--tag-display-limit=0"]
    known = subprocess.run(["lintian-explain-tags", NO_INIT_SCRIPT], capture_output=True)
    if not known.returncode:
        checks += ["--suppress-tags", NO_INIT_SCRIPT]
    if status := subprocess.run(["lintian", "--allow-root", *checks, str(package)]).returncode:
        sys.exit(status)  # lintian has printed what it found


def set_version(debian: Path, version: str) -> None:
    """Replace the version of the changelog's first entry by the version that is built."""
    path = debian / "changelog"
    heading = f"tt-device-plugin ({version}) unstable;"
    path.write_text(re.sub(r"\Att-device-plugin \([^)]+\) [\w-]+;", heading, path.read_text()))


if __name__ == "__main__":
    sys.exit(main())
