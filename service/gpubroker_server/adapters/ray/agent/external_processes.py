"""Processes that users started themselves and that hold a lease. They are measured and watched, but never
signalled."""

import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpubroker.runtime.messages import Report, RunKey
from gpubroker.runtime.process import INSTANCE_MARK

from gpubroker_server.adapters.ray.agent.run_files import RunFiles, RunRecord
from gpubroker_server.adapters.ray.agent.runner_process import gone
from gpubroker_server.adapters.ray.processes import (
    ProcessId,
    WatchedProcess,
    ancestors,
    are_related,
    marks_of,
    process_id,
    process_table,
)
from gpubroker_server.adapters.ray.wire import WireSample

Leases = tuple[tuple[str, int], ...]
"""(device UUID, MiB)"""


@dataclass(slots=True, eq=False)
class ExternalProcess:
    """An external process. It is kept until its end is reported and forgotten."""

    leases: Leases
    watched: WatchedProcess | None = None
    """The watched process; None if it is gone."""
    gone: Report | None = None


class ExternalProcesses:
    """The external processes of one node. Each has a record, so that a later agent watches the process
    itself and not another one that has its pid by then."""

    def __init__(
        self,
        files: RunFiles,
        instance: str,
        ray_node: str,
        runner_pids: Callable[[], Iterable[int]],
        report: Callable[[Report], None],
        measure: Callable[[Sequence[str]], Coroutine[Any, Any, list[WireSample]]],
        do: Callable[[str, Callable[[], Coroutine[Any, Any, None]]], None],
    ) -> None:
        """`runner_pids` returns the process ids of runners. `do` runs a job in the background and repeats it
        until it succeeds."""
        self._files = files
        self._instance = instance
        self._ray_node = ray_node
        self._runner_pids = runner_pids
        self._report = report
        self._measure = measure
        self._do = do
        self._known: dict[RunKey, ExternalProcess] = {}

    def __contains__(self, key: RunKey) -> bool:
        return key in self._known

    def __iter__(self) -> Iterator[RunKey]:
        return iter(self._known)

    def all_reports(self) -> Iterator[Report]:
        return (external.gone for external in self._known.values() if external.gone is not None)

    def alive(self) -> dict[str, tuple[ProcessId, Leases]]:
        """Return the watched processes and their leases, by the key of the run."""
        return {
            str(key): (external.watched.id, external.leases)
            for key, external in self._known.items()
            if external.watched is not None
        }

    def watch(self, key: RunKey, pid: int, leases: Leases) -> None:
        """Begin to watch a process. A process that is absent or not external is reported as gone. A repeated
        call changes nothing, because the pid may belong to another process by now."""
        if key in self._known:
            return
        external = ExternalProcess(leases)
        try:
            process = process_id(pid)
            proof = "not_your_process" if self._is_taken(pid) else ""
        except ProcessLookupError:
            proof = "process_absent"
        self._known[key] = external
        if proof:
            self._note_end(key, external, proof)
        else:
            self._begin(external, RunRecord(*key, leases, "", *process, self._ray_node, 0))

    def adopt(self, record: RunRecord) -> None:
        """Go on watching a process that an earlier agent watched."""
        external = self._known[record.key] = ExternalProcess(record.leases)
        self._begin(external, record)

    def forget(self, key: RunKey) -> None:
        external = self._known.pop(key, None)
        if external is not None:
            self._files.remove_record(key)
            if external.watched is not None:
                external.watched.close()

    def _is_taken(self, pid: int) -> bool:
        """Return True if the memory of this process is or would be attributed to another holder."""
        table = process_table()
        leased = (other.watched.id.pid for other in self._known.values() if other.watched is not None)
        # The agent starts no process of its own, so only its ancestors cannot hold a lease.
        return (
            marks_of(pid).get(INSTANCE_MARK) == self._instance
            or pid in ancestors(os.getpid(), table)
            or any(are_related(pid, other, table) for other in (*self._runner_pids(), *leased))
        )

    def _begin(self, external: ExternalProcess, record: RunRecord) -> None:
        try:
            self._watch(external, record)
        except OSError:  # the disk is full, or this process has too many files open

            async def again() -> None:
                if self._known.get(record.key) is external:
                    self._watch(external, record)

            self._do(f"watching the process of {record.key}", again)

    def _watch(self, external: ExternalProcess, record: RunRecord) -> None:
        """Watch the process of the record. If that fails, raises OSError, and the process is not watched."""
        self._files.write_record(record)
        try:
            external.watched = WatchedProcess(record.process, partial(self._note_end, record.key, external))
        except ProcessLookupError:
            self._note_end(record.key, external)

    def _note_end(self, key: RunKey, external: ExternalProcess, proof: str = "process_absent") -> None:
        external.watched = None
        job = partial(self._report_gone, key, external, proof)
        self._do(f"reporting that the process of {key} is gone", job)

    async def _report_gone(self, key: RunKey, external: ExternalProcess, proof: str) -> None:
        """Report the end of the process with samples of its devices that are measured after it."""
        samples = await self._measure([uuid for uuid, _mb in external.leases])
        if self._known.get(key) is external:
            external.gone = gone(key, proof, samples)
            self._report(external.gone)
            self._files.remove_record(key)
