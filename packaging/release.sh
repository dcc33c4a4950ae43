#!/bin/bash
# Makes a release after all checks have passed: one commit on main, which writes the date into
# CHANGELOG.md, and its tag.
#
#     release.sh VERSION CHECKS
#
# The commit is made and checked in a separate worktree; only then main is moved to it. Nothing is
# pushed.
set -euo pipefail
version=$1 checks=$2
tag=v$version
heading="## $version – unreleased"
place=build/release

refuse() {
    echo "no release: $1" >&2
    exit 1
}

[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || refuse "$version must be three numbers, such as 0.2.0"
[ "$(git branch --show-current)" = main ] || refuse 'the current branch is not main'
[ -z "$(git status --porcelain)" ] || refuse 'there are uncommitted changes'
newest=$({ git tag --list 'v*'; echo "$tag"; } | sort --version-sort | tail -n 1)
[ "$newest" = "$tag" ] || refuse "$newest is already released"
[ -z "$(git tag --list "$tag")" ] || refuse "$tag is already released"
sed "1,/^$heading\$/d; /^## /,\$d" CHANGELOG.md | grep -q '^- ' \
    || refuse "CHANGELOG.md has no \"$heading\" with a list of changes"

git worktree add --quiet --force --detach $place
trap 'git worktree remove --force $place' EXIT
sed -i "s/^$heading\$/## $version – $(date -u +%F)/" $place/CHANGELOG.md
git -C $place commit --quiet --all --message "Release $version"
commit=$(git -C $place rev-parse HEAD)
echo "$checks, in $place"
(cd $place && CI=true RELEASE=true bash -c "$checks") \
    || refuse "$checks failed; nothing was changed"

if [ -n "$(git status --porcelain)" ] || ! git merge --quiet --ff-only "$commit"; then
    refuse 'main has changed during the checks; nothing was released'
fi
git tag --annotate "$tag" --message "tt-device-plugin $version" "$commit"
echo "$tag is tagged. To publish it: git push origin main $tag"
