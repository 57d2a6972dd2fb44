"""Operations on the files that runs of a task left behind."""

import os
import time
from collections.abc import Sequence
from io import BytesIO
from math import inf
from pathlib import Path

from gpubroker.errors import BrokerError, NotCollected
from gpubroker.runtime.archives import ArchiveLimits, BadArchive, unpack
from gpubroker.tasks.task import AnyTask
from gpubroker.tasks.task_api import TaskApi
from gpubroker.transport.decoding import decode
from gpubroker.transport.exchange import Pause, Steps
from gpubroker.transport.operations import operation
from gpubroker.wire.outputs import Output, Outputs

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0
_NO_LIMITS = ArchiveLimits(2**62, 2**31)
"""No limits: the node has already applied those of the service."""


class OutputApi(TaskApi):
    @operation
    def task_outputs(self, task: AnyTask, *, worker: str | None = None) -> Steps[Outputs]:
        """List the collected files of a task's runs, by attempt and rank. For an array or a worker set the
        list has the files of all workers, or of the one named by `worker`."""
        return (yield from self._outputs(task, worker))

    @operation
    def download_outputs(
        self,
        task: AnyTask,
        directory: str | os.PathLike[str] = ".",
        *,
        attempt: int | None = None,
        worker: str | None = None,
        timeout_seconds: float | None = 60.0,
    ) -> Steps[Sequence[Path]]:
        """Write the collected files of an attempt below a directory, and return their paths. Existing files
        are replaced.

            broker.download_outputs(task, "results")

        `attempt` is the last one by default. Its files may still be on their way when the task has ended, so
        this waits up to `timeout_seconds` for them. Files of ranks above 0 are written to `rank-N`, and those
        of several workers to directories named after their ids. Raises NotCollected, with the reason, if
        there are no files.
        """
        found = yield from self._collected(task, attempt, worker, timeout_seconds)
        many = len({one.task for one in found}) > 1
        written: list[Path] = []
        for one in found:
            assert one.object is not None
            target = Path(directory)
            target = target / one.task if many else target
            target = target / f"rank-{one.rank}" if one.rank else target
            data = yield from self._content(one.object)
            written += _unpacked(data, target, one)
        return written

    def _outputs(self, task: AnyTask, worker: str | None) -> Steps[Outputs]:
        path = yield from self._path(task)
        return decode(Outputs, (yield from self._ask("GET", f"{path}/outputs", worker=worker)))

    def _collected(
        self, task: AnyTask, attempt: int | None, worker: str | None, timeout_seconds: float | None
    ) -> Steps[Sequence[Output]]:
        """Return the outputs of the attempt once all of them have arrived. Raises NotCollected if there are
        none."""
        until = inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        pause_seconds = _FIRST_PAUSE_SECONDS
        while True:
            outputs = yield from self._outputs(task, worker)
            last = {output.task: output.attempt for output in outputs.items}
            selected = [
                output for output in outputs.items if output.attempt == (attempt or last[output.task])
            ]
            # Of earlier attempts the service lists nothing until their files have arrived.
            is_late = not selected and any((attempt or 0) < number for number in last.values())
            is_waiting = is_late or any(output.state == "pending" for output in selected)
            if not is_waiting or time.monotonic() >= until:
                break
            yield Pause(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        with_files = [output for output in selected if output.object is not None]
        if not with_files:
            raise NotCollected(_why_none(outputs, selected))
        return with_files


def _why_none(outputs: Outputs, selected: Sequence[Output]) -> str:
    if not outputs.patterns:
        return 'the task collects no files; submit it with outputs=["runs/**"] (--outputs)'
    if not selected:
        attempts = ", ".join(sorted({str(output.attempt) for output in outputs.items})) or "none"
        return f"nothing was collected of that attempt; attempts with outputs: {attempts}"
    message = next((output.message for output in selected if output.message), "")
    return message or f"no file matched {', '.join(outputs.patterns)}"


def _unpacked(data: bytes, target: Path, of: Output) -> Sequence[Path]:
    target.mkdir(parents=True, exist_ok=True)
    names: list[str] = []
    try:
        unpack(BytesIO(data), target, _NO_LIMITS, replaces=True, files=names)
    except BadArchive as fault:
        raise BrokerError(
            f"the files of task {of.task} cannot be written: {fault}", code="result-damaged"
        ) from None
    return [target / name for name in names]
