#!/bin/bash
# Makes an apt repository (suite stable, component main), which any web server can serve.
#
#     repository.sh URL KEY DIRECTORY DEB…
#
# Packages already in the directory's pool stay, so nodes can go back to an earlier version. Beside
# pool and indexes there are two files for nodes: tt-device-plugin.sources and the key.
#
# There is no Valid-Until. It would limit how long an attacker between node and server can replay
# old, validly signed indexes to hide a new version. But if it is not renewed in time, `apt update`
# fails on every node.
set -euo pipefail
url=$1 key=$2 directory=$3
shift 3
name=tt-device-plugin
keyring=$name-archive-keyring.pgp
pool=pool/main/t/$name

mkdir -p "$directory/$pool"
cp -- "$@" "$directory/$pool"
cd "$directory"
for arch in amd64 arm64; do
    indexes=dists/stable/main/binary-$arch
    mkdir -p "$indexes"
    apt-ftparchive --arch "$arch" packages pool >"$indexes/Packages"
    xz --keep --force "$indexes/Packages"
done

# unattended-upgrades selects repositories by Origin and Suite: many-nodes.md names both.
fields=(Origin=$name Label=$name Suite=stable Codename=stable 'Architectures=amd64 arm64'
    Components=main 'Description=Kubernetes device plugin for Tenstorrent accelerators')
rm -f dists/stable/*Release*
release=$(apt-ftparchive "${fields[@]/#/-oAPT::FTPArchive::Release::}" release dists/stable)
echo "$release" >dists/stable/Release
sign=(gpg --batch --yes --quiet --digest-algo SHA512 --local-user "$key" --armor)
"${sign[@]}" --output dists/stable/InRelease --clearsign dists/stable/Release
"${sign[@]}" --output dists/stable/Release.gpg --detach-sign dists/stable/Release

gpg --batch --yes --output "$keyring" --export-options export-minimal --export "$key"
# Without Architectures, each node fetches only the index of its own architecture.
cat >$name.sources <<END
Types: deb
URIs: $url
Suites: stable
Components: main
Signed-By: /etc/apt/keyrings/$keyring
END

echo "$directory: $(ls "$pool" | tr '\n' ' ')"
