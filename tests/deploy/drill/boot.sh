#!/bin/bash
# Boots this machine's systemd in namespaces of its own, on a copy of this machine's files that is gone afterwards,
# with the units of deploy/systemd. Usage, as root: boot.sh REPOSITORY FOLDER SOCKETS DATABASE_URL
# FOLDER: an empty one, best in memory. SOCKETS: of PostgreSQL; they are in /run/postgresql there. What drill.sh writes is in
# FOLDER/result, what the units say in FOLDER/log.
set -eu
repository=$1 folder=$2 sockets=$3 database=$4
root=$folder/root
user=gpubroker

if [ -z "${INSIDE-}" ]; then
    # A group of processes that systemd takes for the whole machine's.
    mkdir -p "$folder/groups"
    mount -t cgroup2 none "$folder/groups"
    group=$folder/groups/gpubroker-drill-$$
    mkdir "$group"
    trap 'sleep 1; find "$group" -depth -type d -exec rmdir {} \; 2> /dev/null; umount "$folder/groups"' EXIT
    INSIDE=1 bash -c 'echo $$ > "$0/cgroup.procs"
        exec unshare --mount --pid --fork --kill-child --net --cgroup --ipc --uts "$@"' "$group" bash "$0" "$@" || true
    exit
fi

mkdir "$folder/changes" "$folder/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/changes,workdir=$folder/work" "$root"
units=$root/etc/systemd/system
rm -rf "$units"
mkdir "$units"
: > "$root/etc/fstab"
# What belongs to a machine, or would clean /tmp.
for unit in systemd-tmpfiles-setup.service systemd-tmpfiles-setup-dev.service systemd-tmpfiles-clean.timer \
    systemd-tmpfiles-clean.service systemd-udevd.service systemd-udev-trigger.service systemd-timesyncd.service \
    systemd-logind.service systemd-journald.service systemd-journald.socket systemd-journald-dev-log.socket \
    systemd-journal-flush.service dbus.service systemd-sysctl.service systemd-modules-load.service \
    systemd-random-seed.service systemd-remount-fs.service systemd-machine-id-commit.service \
    systemd-update-utmp.service apparmor.service networking.service; do
    ln -s /dev/null "$units/$unit"
done
cp "$repository"/deploy/systemd/*.service "$units"
for unit in "$units"/gpubroker*.service; do
    mkdir "$unit.d"
    printf '[Service]\nStandardOutput=append:/log\nStandardError=inherit\n' > "$unit.d/log.conf"
done
# This repository and its Python may lie where the gateway's unit shows nothing.
python=$(readlink -f "$repository/.venv/bin/python")
printf 'ProtectHome=tmpfs\nBindReadOnlyPaths=%s %s\n' "$repository" "$(dirname "$(dirname "$python")")" \
    >> "$units/gpubroker-gateway.service.d/log.conf"
cat > "$units/drill.service" << END
[Service]
Type=oneshot
ExecStart=/bin/bash $repository/tests/deploy/drill/drill.sh
END
printf '[Unit]\nRequires=drill.service\n' > "$units/drill.target"

systemd-sysusers --root="$root" "$repository/deploy/systemd/sysusers.conf"
id=$(awk -F: "/^$user:/{print \$3}" "$root/etc/passwd")
mkdir -p "$root/etc/gpubroker" "$root/opt"
install -d -o "$id" -g "$id" -m 0700 "$root/var/lib/gpubroker"
ln -s "$repository/.venv" "$root/opt/gpubroker"
# The folders above the Python of the tests may be closed to other users.
place=$(dirname "$python")
while [ "$place" != / ]; do
    chmod a+rx "$root$place"
    place=$(dirname "$place")
done
cat > "$root/etc/gpubroker/config.yaml" << END
entrypoints: ["tests.e2e.work:*"]
task_path: [$repository]
simulated_devices: [{kind: sim, memory_mb: 24576}]
END
echo "DRILL_DATABASE_URL=$database" > "$root/etc/gpubroker/drill"

mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t devpts -o newinstance devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mkdir "$root/run/postgresql"
mount --bind "$sockets" "$root/run/postgresql"
for file in result log; do
    touch "$folder/$file" "$root/$file"
    mount --bind "$folder/$file" "$root/$file"
done
ip link set lo up
# Not chroot, in which no process may have users of its own (PrivateUsers).
cd "$root"
mkdir -p mnt/before
pivot_root . mnt/before
umount --lazy /mnt/before
exec env -i container=lxc PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin \
    /lib/systemd/systemd --system --unit=drill.target --log-target=console --log-level=notice --show-status=0
