#!/bin/bash
# Builds DIRECTORY/tt-device-plugin_VERSION_ARCH.deb of the zipapp and the SBOM in that directory.
#
#     build-deb.sh ARCH VERSION DIRECTORY
#
# Nothing is compiled: any machine can build for both architectures. lintian runs if it is installed.
set -euo pipefail
arch=$1 version=$2 directory=$3
name=tt-device-plugin
source=$directory/source
: "${SOURCE_DATE_EPOCH:?}"

rm -rf "$source" "$directory/${name}_"*
mkdir -p "$source/debian"
cp -r packaging/deb/. packaging/systemd/. "$source/debian"
cp README.md CHANGELOG.md "$directory/$name.pyz" "$directory/$name.cdx.json" "$source"
maintainer=$(sed -n 's/^Maintainer: //p' packaging/deb/control)
cat >"$source/debian/changelog" <<END
$name ($version) unstable; urgency=medium

  * See /usr/share/doc/$name/CHANGELOG.md.

 -- $maintainer  $(LC_ALL=C date -uR -d "@$SOURCE_DATE_EPOCH")
END
# dpkg lowers later times to this one, but keeps earlier ones, which differ between checkouts.
find "$source" -exec touch -d "@$SOURCE_DATE_EPOCH" {} +

# make has looked for the tools; dpkg-buildpackage would also require compilers.
echo dpkg-buildpackage
(cd "$source" && LC_ALL=C.UTF-8 dpkg-buildpackage --build=binary --no-sign --no-check-builddeps \
    --host-arch "$arch") >"$directory/build.log" 2>&1 || { cat "$directory/build.log"; exit 1; }

if ! command -v lintian >/dev/null; then
    echo 'lintian is not installed: skipped these checks, which are for maintainers'
    exit
fi
echo lintian
checks=(--allow-root --fail-on 'error,warning,info' --display-info --tag-display-limit=0)
# Nodes with a kubelet run systemd. Debian 13's lintian no longer has the tag, and takes an override
# of it for an error.
no_script=package-supports-alternative-init-but-no-init.d-script
! lintian-explain-tags "$no_script" >/dev/null 2>&1 || checks+=(--suppress-tags "$no_script")
lintian "${checks[@]}" "$directory/${name}_${version}_$arch.deb"
