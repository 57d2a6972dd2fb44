"""Find GPUs on which runs fail quickly, one after the other, although the programs work on other GPUs. The
counts are kept in the leader's memory only."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gpubroker.wire.bounds import PositiveCount
from msgspec import Struct

from gpubroker_server.core.control.memory_failures import memory_of
from gpubroker_server.core.domain.gpu_faults import FailingGpu
from gpubroker_server.core.domain.lease import Lease, Proof
from gpubroker_server.core.domain.orders import Ended, Ending, Gone, RunId
from gpubroker_server.core.domain.setting_marks import PositiveSeconds
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import DeviceKey, Instant, Seconds
from gpubroker_server.core.world.world import World

LATELY_SECONDS = Seconds(3600.0)
MAX_KEPT = 1_000
"""The most failed runs that are remembered of each device, and the most names of runs and the most ended runs
that are remembered in all."""
MAX_NAMED = 3

About = tuple[str, str]
"""The tenant and the name of a task."""


class FailingGpuRules(Struct, frozen=True):
    times: PositiveCount = 5
    """The number of quick failures in a row from which a GPU is a finding."""
    seconds: PositiveSeconds = Seconds(30.0)
    """The time after the start of a run within which its failure is quick."""
    close: bool = False
    """True if a GPU on which runs fail quickly is also closed."""


class QuickFailure(NamedTuple):
    about: About
    at: Instant


class FailingGpus:
    def __init__(self, rules: FailingGpuRules) -> None:
        self._rules = rules
        self._failed: dict[DeviceKey, deque[QuickFailure]] = {}
        """Device -> the runs that failed quickly on it since the last run that worked."""
        self._ran: dict[About, dict[DeviceKey, Instant]] = {}
        """Tenant and name of runs -> the devices on which such a run worked, with the time of the last one.
        The name that ran longest ago comes first."""
        self._ended_runs: dict[RunId, None] = {}
        """Runs whose end was counted, so that the later proof that they are gone is not counted again."""

    def note(self, world: World, reports: Iterable[object]) -> None:
        """Count the ends of runs. Each report must be passed once, before the World knows of it."""
        for report in reports:
            match report:
                case Ended() | Gone(proof=Proof.PROCESS_ABSENT):
                    self._note(world, report)
                case _:
                    pass

    def forget(self, device: DeviceKey) -> None:
        """Forget the failures on a device that an operator has reopened."""
        self._failed.pop(device, None)

    def failing(self, now: Instant) -> tuple[FailingGpu, ...]:
        return tuple(self._found(now))

    def _note(self, world: World, report: Ended | Gone) -> None:
        task, run = world.tasks.get(report.task), (report.task, report.fence, report.rank)
        if (
            task is None
            or task.fence != report.fence
            or task.state is TaskState.STOPPING
            or run in self._ended_runs
        ):
            return
        self._ended_runs[run] = None
        if len(self._ended_runs) > MAX_KEPT:
            del self._ended_runs[next(iter(self._ended_runs))]
        leases = [lease for lease in world.leases_of(task) if lease.rank == report.rank]
        about = task.tenant, task.name
        ran_seconds = 0.0 if task.started_at is None else report.at - task.started_at
        match report:
            case Ended(ending=Ending.SUCCEEDED):
                self._note_good(about, leases, report.at)
            case Ended(ending=Ending.FAILED, failure=failure) if memory_of(failure) in ("host", "node"):
                pass
            case Ended(ending=Ending.FAILED) | Gone() if ran_seconds < self._rules.seconds:
                self._note_failure(about, leases, report.at)
            case Ended(ending=Ending.FAILED) | Gone():
                self._note_good(about, leases, report.at)
            case _:
                pass

    def _note_good(self, about: About, leases: Iterable[Lease], at: Instant) -> None:
        for lease in leases:
            self._failed.pop(lease.device, None)
            self._ran[about] = {**self._ran.pop(about, {}), lease.device: at}
        while len(self._ran) > MAX_KEPT:
            del self._ran[next(iter(self._ran))]

    def _note_failure(self, about: About, leases: list[Lease], at: Instant) -> None:
        if len(leases) == 1:  # with several devices, it is unknown which one is to blame
            failed = self._failed.setdefault(leases[0].device, deque(maxlen=MAX_KEPT))
            failed.append(QuickFailure(about, at))

    def _found(self, now: Instant) -> Iterator[FailingGpu]:
        recent = {
            device: [failure for failure in failed if now - failure.at <= LATELY_SECONDS]
            for device, failed in self._failed.items()
        }
        for device, failed in recent.items():
            others = {
                failure.about
                for other, other_failures in recent.items()
                if other != device
                for failure in other_failures
            }
            working = {
                failure.about for failure in failed if self._works_elsewhere(failure.about, device, now)
            }
            # A program that fails on other devices too, and works on none, is itself at fault.
            counted = [
                failure for failure in failed if failure.about in working or failure.about not in others
            ]
            names = list(dict.fromkeys(failure.about for failure in reversed(counted)))
            if len(counted) >= self._rules.times and (working or len(names) > 1):
                named = tuple(name for _, name in names[:MAX_NAMED])
                yield FailingGpu(device, len(counted), named, counted[0].at, counted[-1].at)

    def _works_elsewhere(self, about: About, device: DeviceKey, now: Instant) -> bool:
        ran = self._ran.get(about, {})
        return any(other != device and now - at <= LATELY_SECONDS for other, at in ran.items())
