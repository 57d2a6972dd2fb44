"""Find faults of nodes: their disks, Ray's object store, connections, GPUs, clocks, and the software of their
agents."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpubroker_server.core.control.disk_guard import paths_by_disk
from gpubroker_server.core.control.findings.finding import Finding, critical, note, warning
from gpubroker_server.core.domain.device import Device, NodeSample, UnreachedNode
from gpubroker_server.core.domain.units import NodeName, Seconds
from gpubroker_server.core.world.world import World

DISK_SHARE, FULL_SHARE = 0.9, 0.98
CLOCK_SECONDS = Seconds(10.0)
"""The difference of two clocks from which it is a finding. Reports may take almost this long."""

Agents = Mapping[str, Mapping[str, Any]]
"""Node -> the facts about its agent, as in `Executor.status`."""


def full_disks(samples: Iterable[NodeSample]) -> Iterator[Finding]:
    for sample in samples:
        name = sample.node
        by_path = {disk.path: disk for disk in sample.disks}
        for disk in (by_path[paths[0]] for paths in paths_by_disk(sample.disks)):
            if disk.used_share >= DISK_SHARE:
                is_full = disk.used_share >= FULL_SHARE
                cause = f"The disk of {disk.path} on {name} is {disk.used_share:.0%} full."
                remedy = f"du -xh {disk.path} | sort -h | tail, on {name}"
                make_finding = critical if is_full else warning
                evidence = {"used": round(disk.used_share, 3), "free_bytes": disk.free_bytes}
                yield make_finding("disk-full", f"{name}:{disk.path}", cause, remedy, evidence)


def spilling_stores(samples: Iterable[NodeSample]) -> Iterator[Finding]:
    for sample in samples:
        if sample.store is not None and sample.store.spilled_mb:
            cause = f"Ray's object store on {sample.node} is too small: it writes objects to disk."
            remedy = "raise ray.object_store_mb; for a joined Ray, --object-store-memory of its `ray start`"
            evidence = {"spilled_mb": sample.store.spilled_mb, "total_mb": sample.store.total_mb}
            yield warning("object-store-spills", sample.node, cause, remedy, evidence)


def unreached_nodes(world: World, samples: Iterable[NodeSample]) -> Iterator[Finding]:
    """Yield a finding for each node that answers the leader but cannot be reached by other nodes. A node that
    does not answer has a finding of its own."""
    by_node: dict[NodeName, list[tuple[NodeName, UnreachedNode]]] = {}
    for sample in samples:
        for peer in sample.unreached:
            if (node := world.nodes.get(peer.node)) is not None and node.ready:
                by_node.setdefault(peer.node, []).append((sample.node, peer))
    for name, failures in by_node.items():
        source, (_, address, fault) = failures[0]
        host, _, port = address.rpartition(":")
        others = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
        cause = (
            f"{source}{others} cannot connect to {address} of {name}, which answers the leader: {fault}. "
            "Gangs and objects need this way."
        )
        remedy = (
            f"nc -vz {host} {port}, on {source}; open Ray's ports between the nodes (`ray start "
            "--node-manager-port`, `--object-manager-port` name them)"
        )
        yield warning("node-unreachable-from-node", name, cause, remedy, {"nodes": len(failures)})


def missing_gpus(world: World, node: str, agent: Mapping[str, Any]) -> list[Device]:
    """Return the GPUs that a node had and that its machine no longer shows."""
    if not agent.get("gpu_absence"):
        return []
    devices = (world.ledgers[key].device for key in world.by_node.get(NodeName(node), ()))
    return [device for device in devices if device.present and not device.simulated]


def unusable_gpus(world: World, agents: Agents) -> Iterator[Finding]:
    """Yield a finding for each GPU that an agent cannot use, and for each node whose machine shows no GPU."""
    for node, agent in agents.items():
        for gpu, why in (agent.get("gpu_faults") or {}).items():
            cause = f"{gpu} of {node} cannot be used: {why}."
            remedy = f"nvidia-smi -q, and dmesg | grep -i -e xid -e nvrm, on {node}"
            yield critical("gpu-unusable", f"{node} {gpu}", cause, remedy)
        if why := agent.get("gpu_absence"):
            missing = missing_gpus(world, node, agent)
            had = f"{node} has had {len(missing)} GPUs and shows none" if missing else f"{node} shows no GPU"
            cause = f"{had}: {why}. The driver is asked again about once a minute."
            remedy = f"nvidia-smi, on {node}; nothing, if it is to run without GPUs"
            make_finding = critical if missing else note
            yield make_finding("no-gpus", node, cause, remedy, {"missing": len(missing)})


def clocks_apart(agents: Agents) -> Iterator[Finding]:
    for node, agent in agents.items():
        seconds = float(agent.get("clock_ahead_seconds") or 0.0)
        if abs(seconds) >= CLOCK_SECONDS:
            direction = "ahead of" if seconds > 0 else "behind"
            cause = f"The clock of {node} is {abs(seconds):.0f} s {direction} the leader's."
            remedy = "chronyc makestep, on the machine whose clock is wrong"
            yield warning("clocks-apart", node, cause, remedy, {"ahead_seconds": round(seconds, 1)})


def versions_apart(agents: Agents) -> Iterator[Finding]:
    """Yield a finding for each agent of an earlier release than the leader's, and for each node with another
    Python or Ray than most nodes."""
    for node, agent in agents.items():
        if agent.get("outdated"):
            cause = f"The agent of {node} is of an earlier release than the leader."
            remedy = (
                "pip install --upgrade 'gpubroker-server[ray]' there; an idle node's agent is then replaced"
            )
            evidence = {"release": agent.get("release") or "unknown", "protocol": agent.get("protocol", 0)}
            yield note("agent-outdated", node, cause, remedy, evidence)
    for software in ("python", "ray"):
        version_of = {node: agent[software] for node, agent in agents.items() if agent.get(software)}
        usual = max(
            Counter(version_of.values()).items(), key=lambda item: (item[1], item[0]), default=("", 0)
        )[0]
        for node, version in version_of.items():
            if version != usual:
                cause = (
                    f"{node} has {software.capitalize()} {version}, most nodes have {usual}: what is "
                    "pickled on one may not open on another."
                )
                remedy = f"gpubroker cordon {node}, then install {software.capitalize()} {usual} there"
                evidence = {"version": version, "usual": usual}
                yield warning(f"{software}-version-differs", node, cause, remedy, evidence)
