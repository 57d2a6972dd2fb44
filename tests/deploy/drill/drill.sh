#!/bin/bash
# What an operator does with the units; run by boot.sh. Each line of /result is a fact: its name, and what was found.
set -u
data=/var/lib/gpubroker
broker() {
    setpriv --reuid=gpubroker --regid=gpubroker --clear-groups \
        env HOME=$data GPUBROKER_DATA_DIR=$data /opt/gpubroker/bin/gpubroker "$@"
}
until_true() { # for a minute at most
    for _ in $(seq 120); do
        "$@" > /dev/null 2>&1 && return
        sleep 0.5
    done
    return 1
}
node_is_ready() { broker nodes 2> /dev/null | grep -q ready; }
task_runs() { broker ps 2> /dev/null | grep -q running; }
witness_is_there() { [ -s $data/witness ]; }
gateway_is_ready() { broker stats 2> /dev/null | grep -q .; }
ray_processes() { pgrep --count --full 'raylet/raylet|gcs/gcs_server'; }
fact() { echo "$*" >> /result; }

systemctl start gpubroker
until_true node_is_ready
fact unit "$(systemctl is-active gpubroker)"
fact result "$(broker submit tests.e2e.work:add -a 2 -a 3 --gpu-mb 1024 --wait 2> /dev/null | tail -1)"

task=$(broker submit tests.e2e.work:hold -a $data/witness -a $data/go --gpu-mb 2048 2>&1 | grep -oE 'task_[0-9a-z]{8,}' | head -1)
until_true witness_is_there
first=$(systemctl show --property MainPID --value gpubroker)
systemctl restart gpubroker
until_true task_runs
fact restarted "$([ "$first" != "$(systemctl show --property MainPID --value gpubroker)" ] && echo yes)"
kill -KILL "$(systemctl show --property MainPID --value gpubroker)"
sleep 3
until_true task_runs
fact restarts-after-kill "$(systemctl show --property NRestarts --value gpubroker)"
touch $data/go
broker wait "$task" > /dev/null 2>&1
fact state-and-attempt "$(broker show "$task" | awk '/^(state|attempt)/{printf "%s ", $2}')"
fact starts "$(wc -l < $data/witness)"

systemctl stop gpubroker
fact ray-after-stop "$(ray_processes)"
systemctl start gpubroker
until_true node_is_ready
broker down > /dev/null 2>&1
fact ray-after-down "$(ray_processes)"
fact unit-after-down "$(systemctl is-active gpubroker)"

rm $data/client.json
. /etc/gpubroker/drill
printf 'GPUBROKER_DATABASE_URL=%s\nGPUBROKER_BLOB_DIR=%s\n' "$DRILL_DATABASE_URL" $data/objects > /etc/gpubroker/environment
systemctl start gpubroker-gateway
until_true gateway_is_ready
fact gateway "$(systemctl is-active gpubroker-gateway)"
fact gateway-accepts "$(broker submit tests.e2e.work:add -a 1 -a 1 2>&1 | grep -c accepted)"
systemctl stop gpubroker-gateway
fact gateway-result "$(systemctl show --property Result --value gpubroker-gateway)"
fact over yes
systemctl poweroff --force --force
