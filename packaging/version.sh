#!/bin/bash
# Prints the version of this source, by `git describe`:
#
#     0.2.0                       the commit with the tag v0.2.0
#     0.2.0+git3.g1a2b3c4d5e      three commits later: below every later release
#     0~git170.g1a2b3c4d5e        before the first release, or a clone without its tags
#     …+dirty                     with uncommitted changes
#     0~source                    no clone; name the version: make deb PACKAGE_VERSION=0.2.0
set -euo pipefail
cd "$(dirname "$0")/.."
git() { command git -c 'safe.directory=*' "$@"; } # root may build in another user's clone

if [ ! -e .git ] || ! type -P git >/dev/null; then
    echo 0~source
elif tagged=$(git describe --match 'v[0-9]*' --abbrev=10 --dirty=+dirty 2>/dev/null); then
    sed -E 's/^v//; s/-([0-9]+)-g/+git\1.g/' <<<"$tagged"
else
    commit=$(git describe --always --exclude '*' --abbrev=10 --dirty=+dirty)
    echo "0~git$(git rev-list --count HEAD).g$commit"
fi
