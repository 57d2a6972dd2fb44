"""Carries out the commands of `gpubroker cluster`, and makes the texts that they print."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpubroker import units

from gpubroker_server.adapters.nvml.probe import gpus_to_share
from gpubroker_server.adapters.ray.cluster import local_cluster
from gpubroker_server.adapters.ray.cluster.layout import ClusterGpu, ClusterLayout
from gpubroker_server.adapters.ray.cluster.local_cluster import ClusterRefused
from gpubroker_server.adapters.ray.head.head import ON_LOOPBACK
from gpubroker_server.adapters.ray.head.node_to_start import LOCALHOST
from gpubroker_server.bootstrap.start_checks import listening_socket, prepare_data_dir
from gpubroker_server.core.domain.units import MIB_BYTES
from gpubroker_server.core.domain.visible_gpus import VARIABLE

_SIMULATED = re.compile(r"(\d+)x(.+)")
_LOOPBACK = " ".join(f"{name}={value}" for name, value in ON_LOOPBACK.items())


def layout_of(
    name: str,
    workers: int,
    gpus_per_node: int,
    simulated: str | None,
    cpus_per_node: int,
    worker_units: float,
    object_store_mb: int,
    port: int,
) -> ClusterLayout:
    """Return the layout that the options describe. Raises ClusterRefused."""
    gpus = _simulated(simulated, name) if simulated else _real() if gpus_per_node else ()
    store_bytes = object_store_mb * MIB_BYTES
    return ClusterLayout(name, workers, gpus, gpus_per_node, cpus_per_node, worker_units, store_bytes, port)


def keep(data_dir: Path, layout: ClusterLayout, say: Callable[[str], None]) -> str:
    """Run the cluster until SIGINT or SIGTERM. Returns the reason if it ended by itself, otherwise an empty
    text. Raises ClusterRefused and StartRefused."""
    token_file = local_cluster.token_file_of(data_dir, layout.name)
    prepare_data_dir(data_dir)
    if layout.port:
        listening_socket(LOCALHOST, layout.port).close()
    address = ""

    def tell(news: Mapping[str, Any]) -> None:
        nonlocal address
        if "node" in news:
            address = news["address"]
            say(in_words(news))
        else:
            say(f"{_how_to_join(address, token_file)}\nCtrl-C ends the cluster")

    fault = local_cluster.run_cluster(data_dir, layout, tell)
    if not fault:
        say(f"cluster {layout.name} ended")
    return fault


def lines_of(seen: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table of the nodes, and how to join the cluster."""
    yield f"{'NODE':12}{'GPUS':12}{'CPUS':6}WORKER UNITS"
    for node in seen["nodes"]:
        gpus = _listed(node["gpus"]) or "none"
        yield f"{node['node']:12}{gpus:12}{node['cpus']:<6}{node['worker_units']:g}"
    yield f"left for workers: {seen['gpus_left']} of {seen['gpus']} GPUs"
    yield _how_to_join(seen["address"], Path(seen["token_file"]))


def _simulated(given: str, name: str) -> tuple[ClusterGpu, ...]:
    matched = _SIMULATED.fullmatch(given)
    try:
        size_mb = units.size_mb(matched[2] if matched else "")
    except ValueError:
        raise ClusterRefused(
            f"--simulated {given!r}: write how many and how large, such as 3x24GiB"
        ) from None
    count = int(matched[1]) if matched else 0
    return tuple(ClusterGpu(index, f"GPU-sim-{name}-{index}", size_mb) for index in range(count))


def _real() -> tuple[ClusterGpu, ...]:
    try:
        return tuple(ClusterGpu(*gpu) for gpu in gpus_to_share(os.environ.get(VARIABLE)))
    except (RuntimeError, ValueError) as fault:
        raise ClusterRefused(str(fault)) from None


def in_words(node: Mapping[str, Any]) -> str:
    gpus = f"GPU {_listed(node['gpus'])}" if node["gpus"] else "no GPU"
    about = f"{gpus}, {node['cpus']} CPU, {node['worker_units']:g} worker_unit"
    return f"{node['node']} runs: {about}" + (f", at {node['address']}" if node["node"] == "head" else "")


def _listed(gpus: list[int]) -> str:
    return ",".join(map(str, gpus))


def _how_to_join(address: str, token_file: Path) -> str:
    return (
        f"join it with:\n  GPUBROKER_RAY__TOKEN_FILE={token_file} gpubroker serve --ray {address}\n"
        f"  RAY_ADDRESS={address} RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token_file} {_LOOPBACK} \\\n"
        "    python program.py"
    )
