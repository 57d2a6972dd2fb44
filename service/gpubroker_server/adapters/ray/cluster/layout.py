"""Assigns GPUs to the nodes of a cluster on one machine: the first ones to the head, the next ones to worker
1, and so on."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from gpubroker_server.adapters.nvml.probe import NODE_GPUS
from gpubroker_server.adapters.ray.head.node_to_start import NodeToStart

HEAD = "head"
WORKER_UNIT = "worker_unit"
"""The name of a resource of Ray, for programs that count workers."""


class ClusterGpu(Struct, frozen=True):
    index: int
    """The number that NVML gives the GPU."""
    uuid: str
    simulated_mb: int = 0
    """The memory of a simulated GPU; 0 for a real one."""


class ClusterLayout(Struct, frozen=True):
    """The layout of a cluster, as requested by `gpubroker cluster start`."""

    name: str
    workers: int
    gpus: tuple[ClusterGpu, ...]
    """The GPUs, in the order in which nodes get them."""
    gpus_per_node: int = 1
    cpus_per_node: int = 1
    worker_units: float = 1.0
    object_store_bytes: int = 128 * 2**20
    port: int = 0
    """The port of the head; 0 for any free port."""

    @property
    def lacking(self) -> str:
        """A message that says why there are too few GPUs for the workers, and what to do; empty if there are
        enough."""
        needed = (self.workers + 1) * self.gpus_per_node
        if needed <= len(self.gpus):
            return ""
        nodes = f"the head and {_counted(self.workers, 'worker')}"
        return (
            f"{nodes} need {_counted(needed, 'GPU')}, {self.gpus_per_node} each, and there "
            f"{'is' if len(self.gpus) == 1 else 'are'} {len(self.gpus)}; {self._remedy(needed)}"
        )

    def next_worker(self, taken: Collection[int]) -> int | str:
        """Return the lowest free number of a worker, or a message that says why no worker can be added and
        what to do."""
        number = next(number for number in range(1, len(taken) + 2) if number not in taken)
        if self._gpus_of(number) is not None:
            return number
        return (
            f"no GPU is left for {worker_name(number)}: the head and {_counted(len(taken), 'worker')} have "
            f"{self.gpus_per_node} each, and cluster {self.name} has {_counted(len(self.gpus), 'GPU')}; "
            f"{self._remedy((number + 1) * self.gpus_per_node)}"
        )

    def gpus_of(self, number: int) -> tuple[ClusterGpu, ...]:
        """Return the GPUs of node `number`; the head is 0."""
        return self._gpus_of(number) or ()

    def node(self, number: int, head: str, temp_dir: Path | None) -> NodeToStart:
        gpus = self.gpus_of(number)
        own: list[Any] = [
            [gpu.uuid, gpu.index, gpu.simulated_mb] if gpu.simulated_mb else gpu.index for gpu in gpus
        ]
        env = {NODE_GPUS: json.dumps(own)}
        if not any(gpu.simulated_mb for gpu in gpus):
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in gpus)
        return NodeToStart(
            self.object_store_bytes,
            temp_dir,
            head=head,
            name=worker_name(number) if number else HEAD,
            port=self.port,
            cpus=self.cpus_per_node,
            gpus=len(gpus),
            resources={WORKER_UNIT: self.worker_units} if self.worker_units else {},
            env=env,
        )

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "ClusterLayout":
        return msgspec.json.decode(text, type=cls)

    def _gpus_of(self, number: int) -> tuple[ClusterGpu, ...] | None:
        first = number * self.gpus_per_node
        gpus = self.gpus[first : first + self.gpus_per_node]
        return gpus if len(gpus) == self.gpus_per_node else None

    def _remedy(self, needed: int) -> str:
        simulated = next((gpu.simulated_mb for gpu in self.gpus if gpu.simulated_mb), 0)
        if simulated:
            return f"start the cluster with more simulated ones: --simulated {needed}x{simulated}MiB"
        return (
            "use a machine with more of them, start the cluster with fewer --gpus-per-node (0: none), or try "
            f"it with simulated ones: --simulated {needed}x24GiB"
        )


def worker_name(number: int) -> str:
    return f"worker-{number}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
