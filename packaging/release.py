#!/usr/bin/env python3
"""Makes a release, after all checks have passed, or opens the next version.

    release.py VERSION [--checks COMMAND] [--next VERSION]     called by `make release`
    release.py --open VERSION                                  only opens that version

The release is one commit on main, which closes both changelogs, and its tag, v<VERSION>. It is made
and checked, by COMMAND (.ci/run), in a separate worktree below build/; only then main is moved to
it. A second commit opens the next version (version.py describes the versions of its commits).
Nothing is pushed.
"""

from __future__ import annotations

import argparse
import datetime
import email.utils
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import version as versions
from version import CHANGELOG, PROGRAM, TOP, git

NEWS = "CHANGELOG.md"
INSTALLED = f"/usr/share/doc/tt-device-plugin/{NEWS}"  # as the package has it
OPEN = "unreleased"  # in place of the date
MAINTAINER = "tt-device-plugin maintainers <maintainers@tt-device-plugin.invalid>"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Makes a release.")
    parser.add_argument("version", nargs="?", help="such as 0.2.0")
    parser.add_argument(
        "--open", metavar="VERSION", help="only open this version, in the files here"
    )
    parser.add_argument(
        "--next", metavar="VERSION", help="opened after the release; default: one minor version on"
    )
    parser.add_argument(
        "--checks", metavar="COMMAND", default=".ci/run", help="must succeed; default: %(default)s"
    )
    options = parser.parse_args()
    if bool(options.version) == bool(options.open):
        parser.error("either a version to release or one to open")
    try:
        if options.open:
            open_version(TOP, options.open)
        else:
            release(
                TOP, options.version, options.next or following(options.version), options.checks
            )
    except versions.Unknown as reason:
        sys.exit(f"no release: {reason}")
    return 0


def release(top: Path, version: str, following_version: str, checks: str) -> None:
    """Check, commit, tag, and open the next version.

    Raises Unknown with all reasons against the release.
    """
    if reasons := list(faults(top, version)):
        raise versions.Unknown("; ".join(reasons))
    begun_at = git(top, "rev-parse", "HEAD")
    place = top / "build/release"
    git(top, "worktree", "add", "--force", "--detach", str(place), begun_at)
    try:
        close_version(place, version, datetime.datetime.now(datetime.timezone.utc))
        git(place, "commit", "--all", "--message", f"Release {version}")
        commit = git(place, "rev-parse", "HEAD")
        run_checks(place, checks)
        if git(top, "rev-parse", "HEAD") != begun_at or git(top, "status", "--porcelain"):
            raise versions.Unknown("main has changed during the checks; nothing was released")
        git(top, "merge", "--ff-only", commit)
        message = f"tt-device-plugin {version}"
        git(top, "tag", "--annotate", f"v{version}", "--message", message, commit)
    finally:
        git(top, "worktree", "remove", "--force", str(place))
    open_version(top, following_version)
    git(top, "commit", "--all", "--message", f"Open {following_version}")
    print(f"v{version} is tagged, and {following_version} is open. To publish the release:")
    print(f"    git push origin main v{version}")


def run_checks(place: Path, checks: str) -> None:
    """Run a command with the environment of CI. Raises Unknown if it fails."""
    print(f"{checks}, in {place}", flush=True)
    environment = {**os.environ, "CI": "true", "RELEASE": "true"}
    for name in ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS"):  # of the calling make
        environment.pop(name, None)
    status = subprocess.run(["bash", "-c", checks], cwd=place, env=environment).returncode
    if status:
        raise versions.Unknown(f"{checks} failed with status {status}; nothing was changed")


def faults(top: Path, version: str) -> Iterator[str]:
    """Yield the reasons against a release of this version now."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"{version} must be three numbers, such as 0.2.0"
        return
    if git(top, "branch", "--show-current") != "main":
        yield "the current branch is not main"
    if git(top, "status", "--porcelain"):
        yield "there are uncommitted changes"
    if git(top, "rev-parse", "--is-shallow-repository") == "true":
        yield "this clone is shallow"
    released = [
        tag
        for tag in git(top, "tag", "--list", "v*").splitlines()
        if re.fullmatch(r"v\d+\.\d+\.\d+", tag)
    ]
    if newer := [tag for tag in released if numbers(tag[1:]) >= numbers(version)]:
        yield f"{newer[-1]} is already released"
    entry = versions.first_entry(top)
    if entry != (version, False):
        state = ", already closed" if entry.released else ""
        yield f"{CHANGELOG} begins with {entry.version}{state}"
    first = (top / CHANGELOG).read_text().split("\n -- ")[0]
    if not re.search(r"(?m)^  \* \S", first):
        yield f"{CHANGELOG} has no entry for {version}"
    news = re.search(
        rf"(?ms)^## {re.escape(version)} – {OPEN}$(.*?)(?=^## |\Z)", (top / NEWS).read_text()
    )
    if not (news and re.search(r"(?m)^- \S", news[1])):
        yield f'{NEWS} has no "## {version} – {OPEN}" with a list of changes'


def numbers(version: str) -> list[int]:
    """Return a version as numbers, which can be compared."""
    return [int(number) for number in version.split(".")]


def following(version: str) -> str:
    """Return the next minor version."""
    major, minor, *_ = [*version.split("."), "0"]
    return f"{major}.{int(minor) + 1}.0" if minor.isdigit() else version


def close_version(top: Path, version: str, now: datetime.datetime) -> None:
    """Write the date of the release into both changelogs."""
    line = f" -- {MAINTAINER}  {email.utils.format_datetime(now)}"
    text = (top / CHANGELOG).read_text().replace(") UNRELEASED;", ") unstable;", 1)
    (top / CHANGELOG).write_text(re.sub(r"(?m)^ -- .*$", line, text, count=1))
    news = (top / NEWS).read_text()
    (top / NEWS).write_text(
        news.replace(f"## {version} – {OPEN}\n", f"## {version} – {now:%Y-%m-%d}\n", 1)
    )


def open_version(top: Path, version: str) -> None:
    """Open a version: in the program, and with an entry in both changelogs."""
    program = top / PROGRAM
    program.write_text(versions.with_version(program.read_text(), version))
    now = email.utils.format_datetime(datetime.datetime.now(datetime.timezone.utc))
    changelog = top / CHANGELOG
    entry = f"tt-device-plugin ({version}) UNRELEASED; urgency=medium\n\n  * See {INSTALLED}.\n\n"
    changelog.write_text(f"{entry} -- {MAINTAINER}  {now}\n\n{changelog.read_text()}")
    news = (top / NEWS).read_text()
    head, first, rest = news.partition("\n## ")
    (top / NEWS).write_text(f"{head}\n## {version} – {OPEN}\n{first}{rest}")


if __name__ == "__main__":
    sys.exit(main())
