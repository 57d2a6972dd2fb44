#!/bin/bash
# Runs the images that build.sh has built, in namespaces of its own with nothing but a loopback network: all that it
# starts ends with it. Usage, as root: run.sh FOLDER SOCKETS DATABASE_URL
# SOCKETS: of PostgreSQL; they are in /run/postgresql there. What it finds is in FOLDER/result.
set -eu
folder=$1 sockets=$2 database=$3

if [ -z "${INSIDE-}" ]; then
    INSIDE=1 exec unshare --mount --pid --fork --kill-child --mount-proc --net --ipc --uts bash "$0" "$@"
fi
ip link set lo up
mount -t tmpfs none /run
umount --recursive /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup # crun takes no mixture of both versions
export CONTAINERS_STORAGE_CONF=$folder/storage.conf CONTAINERS_CONF=$folder/containers.conf
files=$(ulimit -Hn) processes=$(ulimit -Hu)
cat > "$CONTAINERS_CONF" << END
[engine]
runtime = "crun"
cgroup_manager = "cgroupfs"
events_logger = "none"
[containers]
cgroups = "disabled"
netns = "host"
log_driver = "k8s-file"
default_ulimits = ["nofile=$files:$files", "nproc=$processes:$processes"]
END
found() { # name, value
    echo "$*" >> "$folder/result"
}
read_only=(--pull=never --health-interval=disable --read-only --read-only-tmpfs=false
    --tmpfs /tmp:rw,noexec,nosuid,nodev,mode=1777 --cap-drop=all --security-opt=no-new-privileges)
started() { # name, and more of podman run
    podman run "${read_only[@]}" --detach --name "$1" --shm-size=512m "${@:2}" > "$folder/id-$1"
}
once() { # what podman run takes
    podman run "${read_only[@]}" --rm "$@"
}
healthy() { # name: wait until its health check says so
    for _ in $(seq 60); do
        if podman healthcheck run "$1" > "$folder/health-$1" 2>&1; then
            found "health-$1 yes"
            return
        fi
        sleep 1
    done
    podman logs "$1" 2>&1 | tail -20
    cat "$folder/health-$1"
    exit 1
}
stopped() { # name
    podman stop --time 40 "$1" > "$folder/id-$1"
    found "stopped-$1 $(podman inspect --format '{{.State.ExitCode}}' "$1")"
}
server=localhost/gpubroker-server:1 gateway=localhost/gpubroker-gateway:1
mkdir "$folder/code"
cat > "$folder/code/work.py" << END
import os


def seen():
    return [os.getuid(), os.access("/", os.W_OK), os.access("/srv/code", os.W_OK)]
END
tasks=(--volume "$folder/code:/srv/code:ro" --env 'GPUBROKER_ENTRYPOINTS=work:*'
    --env 'GPUBROKER_SIMULATED_DEVICES=[{"memory_mb": 24576}]')
known=(--env GPUBROKER_ALLOWED_HOSTS=gpus.example.org)

# Without host names it does not listen, and says what to set.
code=0
once "$server" > "$folder/refusal" 2>&1 || code=$?
found "refused $code $(grep -c 'allowed_hosts is empty.*GPUBROKER_ALLOWED_HOSTS=' "$folder/refusal")"
code=0
once "$server" health > "$folder/unhealthy" 2>&1 || code=$?
found "nothing-runs $code"

# One machine: service, local Ray and tasks in one container.
started server --volume state:/var/lib/gpubroker "${tasks[@]}" "${known[@]}" "$server"
healthy server
found "says $(podman exec server gpubroker health)"
found "first-process $(podman exec server cat /proc/1/comm)"
found "user $(podman exec server sh -c 'echo $(id -u) $(id -g)')"
found "licence $(podman exec server head -1 /usr/share/doc/gpubroker/LICENSE)"
submit=(gpubroker submit --wait work:seen --gpu-memory 18GiB)
found "task $(podman exec server "${submit[@]}" | tr -d ' \n')"
found "zombies $(podman exec server sh -c 'cat /proc/[0-9]*/stat' 2> "$folder/gone" | grep -c ') Z ' || true)"
stopped server
podman start server > "$folder/id-server"
healthy server
found "kept $(podman exec server gpubroker result last | tr -d ' \n')"
stopped server

# Several: a gateway without Ray, a broker, and a Ray node.
shared=(--volume shared:/var/lib/gpubroker --volume "$sockets:/run/postgresql" --env "GPUBROKER_DATABASE_URL=$database"
    --env GPUBROKER_BLOB_DIR=/var/lib/gpubroker/objects)
found "migrated $(once "${shared[@]}" "$gateway" migrate 2>&1 | grep -o 'the database is now at')"
started gateway "${shared[@]}" "${tasks[@]}" "${known[@]}" --env GPUBROKER_DATA_DIR=/var/lib/gpubroker/gateway "$gateway"
started broker "${shared[@]}" "${tasks[@]}" --env GPUBROKER_DATA_DIR=/var/lib/gpubroker/broker "$server" broker
healthy gateway
healthy broker
found "broker-says $(podman exec broker gpubroker health | sed 's/[0-9][0-9]*/N/')"
found "ray-in-gateway $(podman exec gateway python -c 'import importlib.util as u; print(u.find_spec("ray"))')"
found "task-over-gateway $(podman exec gateway "${submit[@]}" | tr -d ' \n')"
stopped gateway
stopped broker
# As in compose.yaml: a broker in another container shares its files.
started node --volume ray:/tmp/ray --entrypoint '["tini", "-s", "--", "ray"]' --health-cmd '["gpubroker", "health", "node"]' "$server" \
    start --head --block --port=6379 --node-name=n1 --include-dashboard=false --num-cpus=1
healthy node
podman stop --time 40 node > "$folder/id-node"
found "over yes"
