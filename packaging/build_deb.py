#!/usr/bin/env python3
"""Builds dist/tt-device-plugin_<version>_<arch>.deb from packaging/deb, by dpkg-buildpackage, and
asks lintian.

Nothing is compiled, so that any machine can build for any architecture. version.py says what
version it is.
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
from build_pyz import BUILD, TOP

# What the package installs, and where dpkg-buildpackage gets it from; the rest of packaging/deb is
# debian/.
BESIDE = {
    "tt-device-plugin": "bin/tt-device-plugin",
    "back-off": "back-off",
    "config.toml": "config.toml",
    "config-at-first.toml": "config-at-first.toml",
    "completion.bash": "completions/tt-device-plugin",
    "tt-device-plugin.8": "tt-device-plugin.8",
}
FOR_DEBHELPER = {
    "tt-device-plugin.service": "tt-device-plugin.service",
    "tt-device-plugin-metrics.socket": "tt-device-plugin-metrics.socket",
    "tmpfiles.conf": "tt-device-plugin.tmpfiles",
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds the Debian package.")
    parser.add_argument(
        "--arch", default=build_pyz.MACHINES.get(os.uname().machine), help="default: this machine's"
    )
    parser.add_argument(
        "--output", type=Path, default=TOP / "dist", help="directory; default: %(default)s"
    )
    parser.add_argument("--version", help="default: what version.py says")
    parser.add_argument("--no-lintian", action="store_true", help="do not ask lintian")
    options = parser.parse_args()
    version = options.version or build_pyz.package_version()

    top = BUILD / "deb" / options.arch
    source = top / "source"
    shutil.rmtree(top, ignore_errors=True)
    shutil.copytree(
        TOP / "packaging/deb", source / "debian", ignore=shutil.ignore_patterns(*BESIDE)
    )
    for name, place in BESIDE.items():
        (source / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TOP / "packaging/deb" / name, source / place)
    for script in ("bin/tt-device-plugin", "back-off"):
        (source / script).chmod(0o755)
    shutil.copytree(TOP / "packaging/systemd", source / "systemd")
    for name, place in FOR_DEBHELPER.items():
        (source / "systemd" / name).rename(source / "debian" / place)
    set_version(source / "debian/changelog", version)
    epoch = {**os.environ, "SOURCE_DATE_EPOCH": str(build_pyz.source_date_epoch())}
    build = [
        sys.executable,
        str(TOP / "packaging/build_pyz.py"),
        "--arch",
        options.arch,
        "--version",
        version,
    ]
    subprocess.run(
        [*build, "--output", str(source / "tt-device-plugin.pyz")], check=True, env=epoch
    )

    print("dpkg-buildpackage", flush=True)
    log = top / "build.log"
    # What is missing make has said; left to itself, dpkg-buildpackage wants compilers in addition.
    command = [
        "dpkg-buildpackage",
        "--build=binary",
        "--no-sign",
        "--no-check-builddeps",
        "--host-arch",
        options.arch,
    ]
    environment = {**epoch, "LC_ALL": "C.UTF-8", "DEB_BUILD_OPTIONS": "nocheck"}
    with log.open("w") as lines:
        built = subprocess.run(
            command, cwd=source, env=environment, stdout=lines, stderr=subprocess.STDOUT
        )
    if built.returncode:
        sys.exit(f"{log.read_text()}\ndpkg-buildpackage failed")
    package = top / f"tt-device-plugin_{version}_{options.arch}.deb"
    if options.no_lintian:
        pass
    elif shutil.which("lintian"):
        print("lintian", flush=True)
        checks = [
            "--allow-root",
            "--fail-on",
            "error,warning,info",
            "--display-info",
            "--tag-display-limit=0",
        ]
        subprocess.run(["lintian", *checks, str(package)], check=True)
    else:
        print("lintian has not looked at it: apt install lintian")
    options.output.mkdir(parents=True, exist_ok=True)
    result = options.output / package.name
    shutil.copy(package, result)
    print(f"{result}: {result.stat().st_size / 1e6:.1f} MB")
    return 0


def set_version(changelog: Path, version: str) -> None:
    """Give the changelog's first entry the version that is built, perhaps one before its own."""
    text, number = re.subn(
        r"\A(tt-device-plugin) \([^)]+\)", rf"\1 ({version})", changelog.read_text()
    )
    assert number == 1
    changelog.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
