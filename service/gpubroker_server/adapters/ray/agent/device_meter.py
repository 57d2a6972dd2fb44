"""What every device of this machine holds, and how much of that is whose."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from gpubroker_server.adapters.ray.processes import ProcessId, descendants, process_table
from gpubroker_server.adapters.ray.wire import WireSample
from gpubroker_server.core.domain.orders import SeenDevice
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.ports.devices import DeviceProbe, ProcessGroup

MEASURE_SECONDS = 30.0


class NotMeasured(Exception):
    """Devices that somebody needs to know about could not be measured."""


class Meter:
    """One measurement at a time, in a thread of its own: a driver that hangs holds up nothing else."""

    def __init__(self, probe: DeviceProbe) -> None:
        self._probe = probe
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="meter")

    def inventory(self) -> Sequence[SeenDevice]:
        return self._probe.inventory()

    async def measure(
        self,
        processes: Mapping[str, tuple[ProcessId, Mapping[str, int]]],
        needed: Collection[str] = (),
        timeout_seconds: float = MEASURE_SECONDS,
    ) -> list[WireSample]:
        """`processes`: key of a run -> its process and its leases, in MiB by UUID. What is below two of them
        is the first one's.

        Raises NotMeasured if one of the `needed` UUIDs is in this machine and gave no answer, TimeoutError,
        and whatever the driver raises.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_seconds):
            samples = await loop.run_in_executor(self._thread, self._sample, processes)
        answered = {uuid for uuid, *_ in samples}
        silent = {device.uuid for device in self.inventory()} & set(needed) - answered
        if silent:
            raise NotMeasured(f"no answer of {', '.join(sorted(silent))}")
        return samples

    def _sample(self, processes: Mapping[str, tuple[ProcessId, Mapping[str, int]]]) -> list[WireSample]:
        table = process_table() if processes else {}
        groups: dict[str, ProcessGroup] = {}
        taken: set[int] = set()
        for mark, (process, leases) in processes.items():
            if process.pid in table and table[process.pid].id == process:
                tree = {process.pid, *(child.pid for child in descendants(process.pid, table))}
                by_uuid = {uuid: Mib(mb) for uuid, mb in leases.items()}
                groups[mark] = ProcessGroup(frozenset(tree - taken), by_uuid)
                taken |= tree
        return [
            (device.uuid, device.used_mb, device.foreign_mb, dict(device.by_holder), device.utilization)
            for device in self._probe.sample(groups)
        ]
