#!/bin/bash
# Builds both images of the Dockerfile with podman, without a registry, and again after a change of a source.
# Usage, as root: build.sh REPOSITORY FOLDER. Needs Debian's podman, crun and mmdebstrap. All that podman keeps is in
# FOLDER/podman.
set -eu
repository=$1 folder=$2
if [ -z "${INSIDE-}" ]; then # so that no mount and no process outlives it
    INSIDE=1 exec unshare --mount --pid --fork --kill-child --mount-proc bash "$0" "$@"
fi
mkdir -p "$folder/podman" "$folder/base" "$folder/context"
export CONTAINERS_STORAGE_CONF=$folder/storage.conf
cat > "$folder/storage.conf" << END
[storage]
driver = "overlay"
graphroot = "$folder/podman/images"
runroot = "$folder/podman/run"
END
built() { # what podman build takes
    podman build --quiet --isolation chroot --format docker --layers --pull=never "$@"
}
argument() {
    sed -n "s/^ARG $1=//p" "$repository/Dockerfile"
}

# Stand-ins for the two images that a registry has: a Debian with its Python 3.11, and uv.
cd "$folder/base"
mmdebstrap --quiet --mode=root --variant=minbase --include=python3,ca-certificates bookworm debian.tar
install -m 0755 "$repository/.tools/bin/uv" uv
cp "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" trusted.crt
cat > python << END
FROM scratch
ADD debian.tar /
COPY trusted.crt /etc/ssl/certs/ca-certificates.crt
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
END
printf 'FROM scratch\nCOPY uv /uv\n' > uv-image
built --tag "docker.io/library/python:$(argument PYTHON)-slim" --file python .
built --tag "ghcr.io/astral-sh/uv:$(argument UV)" --file uv-image .

# The files of this tree that git knows or would take.
cd "$repository"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --no-dereference -t "$folder/context"
cd "$folder/context"
for round in 1 2; do
    for image in server gateway; do
        built --target $image --tag "localhost/gpubroker-$image:$round" .
        podman image inspect --format '{{json .RootFS.Layers}}' "localhost/gpubroker-$image:$round" \
            > "$folder/layers-$image-$round"
    done
    echo '"""Changed."""' >> service/gpubroker_server/__init__.py
done
podman images --format '{{.Repository}}:{{.Tag}} {{.Size}}' > "$folder/sizes"
