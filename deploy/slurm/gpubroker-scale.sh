#!/bin/sh
# Have Slurm start a node for each GPU that waiting tasks lack, and end idle nodes.
# Run it each minute, by cron or scrontab, as the user of the nodes; docs/how-to/autoscale.md explains it.
set -eu

demand=$(gpubroker demand --waited "${WAITED:-30s}" -o json)
read_demand() {
    printf '%s' "$demand" | python3 -c "import json, sys; found = json.load(sys.stdin); print($1)"
}
spare_nodes() { read_demand '*(node["name"] for node in found["spare"]["nodes"])'; }

lacking=$(read_demand 'found["unmet"]["gpus"]')
coming=$(squeue --me --noheader --name=gpubroker-node --states=PENDING,CONFIGURING | wc -l)
while [ "$coming" -lt "$lacking" ]; do
    sbatch "${NODE:-gpubroker-node.sbatch}"
    coming=$((coming + 1))
done

closed=""
for node in $(spare_nodes); do
    case $node in slurm-*) gpubroker cordon "$node" --because "Slurm ends it" && closed="$closed $node" ;; esac
done
[ -n "$closed" ] || exit 0

# Some may have got work before they were closed.
demand=$(gpubroker demand -o json)
spare=" $(spare_nodes) "
for node in $closed; do
    case $spare in
    *" $node "*) scancel "${node#slurm-}" ;;
    *) gpubroker uncordon "$node" ;;
    esac
done
