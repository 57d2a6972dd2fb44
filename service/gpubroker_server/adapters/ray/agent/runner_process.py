"""The runs that a node agent has, and the runner processes that they are in."""

import asyncio
import os
import signal
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from gpubroker.runtime.journal import START_OVER
from gpubroker.runtime.messages import RESIZES, SPOKEN, Report, RunKey, RunOrder, newest_shared
from ray.exceptions import OutOfMemoryError, RayError

from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.processes import ProcessId, WatchedProcess, private_mb_below
from gpubroker_server.adapters.ray.wire import WireSample, unpack

log = structlog.get_logger("gpubroker.agent")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 30.0
LAST_REPORTS_SECONDS = 5.0
REMEDY = "ask for more as memory_mb, or take less"
RUNNER_MB = 128
"""The host memory that a run need not ask for, because a runner takes it before any user code runs."""
REMEMBERED_FENCES = 100_000
REMEMBERED_RUNS = 1024


async def retry_until_done(job: str, attempt: Callable[[], Awaitable[None]]) -> None:
    """Call `attempt` again and again, at growing intervals, until it succeeds. Each failure is logged."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return await attempt()
        except Exception:
            log.exception("what must be done failed; trying again", job=job)
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


async def describe(actor: Any, timeout_seconds: float) -> dict[str, Any]:
    """Return a runner's answer about itself, with `protocol`, the newest protocol that both sides speak.
    Raises RayError and TimeoutError, and ValueError if they share no protocol."""
    async with asyncio.timeout(timeout_seconds):
        described: dict[str, Any] = unpack(await actor.describe.remote())
    protocol = newest_shared(described["speaks"])
    if protocol is None:
        raise ValueError(f"it speaks protocols {described['speaks']}, this agent {SPOKEN}")
    return described | {"protocol": protocol}


class RunnerProcess:
    """One runner process and the conversation with it.

    `on_report` receives every report once, in order. `on_end` is called when the process is gone and no more
    reports will come; if it raises, it is called again.
    """

    def __init__(
        self,
        name: str,
        actor: Any,
        process: ProcessId,
        shared: bool,
        protocol: int,
        on_report: Callable[["RunnerProcess", Report], None],
        on_end: Callable[["RunnerProcess"], None],
    ) -> None:
        """Begin to watch the process. Raises ProcessLookupError if it is gone."""
        self.name = name
        self.shared = shared
        self.protocol = protocol
        self.runs: set[RunKey] = set()
        """The runs in this process that have not ended."""
        self.retiring = False
        self.out_of_memory = False
        self.breach = ""
        """The reason why the agent ends the process, if it took more host memory than allowed; empty
        otherwise."""
        self.exit_status: int | None = None
        self.watched = WatchedProcess(process, self._note_end)
        self._actor = actor
        self._on_report = on_report
        self._on_end = on_end
        self._received = 0
        self._early: dict[int, Report] = {}
        self._calls = 0
        self._open_calls: set[asyncio.Task[None]] = set()
        self._waiting: list[tuple[Any, ...]] = []

    def send(self, *items: tuple[Any, ...]) -> None:
        """Send orders to the process. Orders of one turn of the event loop are sent in one call. A process
        whose protocol is below RESIZES is not told that ranks have joined."""
        items = tuple(item for item in items if item[0] != "resized" or self.protocol >= RESIZES)
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._send_waiting)
        self._waiting += items

    def listen_again(self, *items: tuple[Any, ...]) -> None:
        """Receive again every report that the process still keeps. An agent calls this for a process that it
        did not start."""
        self._received = START_OVER
        self._call(items)

    def _send_waiting(self) -> None:
        items, self._waiting = self._waiting, []
        self._call(items)

    def _call(self, items: Sequence[tuple[Any, ...]]) -> None:
        self._calls += 1
        self._keep(self._exchange(self._calls, items))

    def _keep(self, call: Any) -> None:
        task = asyncio.create_task(call)
        self._open_calls.add(task)
        task.add_done_callback(self._open_calls.discard)

    async def _exchange(self, number: int, items: Sequence[tuple[Any, ...]]) -> None:
        try:
            self._receive(unpack(await self._actor.exchange.remote(self.protocol, self._received, items)))
        except OutOfMemoryError:
            self.out_of_memory = True
        except RayError as fault:
            # Usually the process has just ended. A process that lives but does not answer is of no use.
            log.info("a runner is lost", runner=self.name, fault=str(fault))
            self.watched.signal(signal.SIGKILL)
        except Exception:
            # No further report of the process would be received, not even the ends of its runs.
            log.exception("a runner's reports cannot be read; ending it", runner=self.name)
            self.watched.signal(signal.SIGKILL)
        else:
            if number == self._calls and self.runs:
                self._call([])

    def _receive(self, reply: Sequence[tuple[int, Report]]) -> None:
        """Hand on reports in order. The reply of a later call may come first, so reports wait for those that
        were written before them."""
        self._early.update((number, report) for number, report in reply if number > self._received)
        if self._received == START_OVER and self._early:
            self._received = min(self._early) - 1
        while (report := self._early.pop(self._received + 1, None)) is not None:
            self._received += 1
            self._on_report(self, report)

    def _note_end(self) -> None:
        self._keep(self._finish())

    async def _finish(self) -> None:
        """Report the end of the process once its last reports have arrived, or after LAST_REPORTS_SECONDS."""
        calls = self._open_calls - {asyncio.current_task()}
        if calls:
            await asyncio.wait(calls, timeout=LAST_REPORTS_SECONDS)
        self.exit_status = await self.watched.exit_status()
        await retry_until_done(f"noting that runner {self.name} has ended", self._report_end)

    async def _report_end(self) -> None:
        self._on_end(self)


@dataclass(slots=True, eq=False)
class AgentRun:
    """One run, kept from its order until it is gone and its outcome is forgotten."""

    order: RunOrder
    shared: bool
    process: RunnerProcess | None = None
    """The process that the run is in; None before the run has one, and once it is gone."""
    reports: dict[str, Report] = field(default_factory=dict)
    """The newest report of each kind: started, ready, checkpointed, items, part, ended and gone."""
    forgotten: bool = False
    go: str = ""
    """The address of rank 0; empty until all ranks are ready. It is passed on to the process that the run
    gets."""
    killed: str = ""
    """The reason why the run's process was killed; empty if it was not."""
    kill: asyncio.TimerHandle | None = None
    ordered_at: float | None = field(default_factory=time.time)
    """The time when the agent got the order; None for a run that an earlier agent started."""

    @property
    def key(self) -> RunKey:
        return self.order.key

    @property
    def has_ended(self) -> bool:
        return "ended" in self.reports

    @property
    def is_gone(self) -> bool:
        return "gone" in self.reports


class RunTable:
    """The runs that the agent has, the last reports of runs that are gone, and the fences that must not
    start again."""

    def __init__(self) -> None:
        self.runs: dict[RunKey, AgentRun] = {}
        self._fences: OrderedDict[tuple[str, int], int] = OrderedDict()
        """The highest fence that was seen of each task and rank, the least recently used one first."""
        self._gone: deque[Report] = deque(maxlen=REMEMBERED_RUNS)
        self._suspects: OrderedDict[str, None] = OrderedDict()

    def is_new(self, key: RunKey) -> bool:
        return key.fence > self._fences.get((key.task, key.rank), 0)

    def note_fence(self, key: RunKey) -> None:
        """Note a fence. From now on, neither this fence nor a lower one of the task is new."""
        name = (key.task, key.rank)
        self._fences[name] = max(key.fence, self._fences.get(name, 0))
        self._fences.move_to_end(name)
        if len(self._fences) > REMEMBERED_FENCES:
            self._fences.popitem(last=False)

    def suspect(self, task: str) -> None:
        """Note that a run of this task may have crashed a shared process. The task's next run gets a process
        of its own."""
        self._suspects[task] = None
        if len(self._suspects) > REMEMBERED_RUNS:
            self._suspects.popitem(last=False)

    def is_suspect(self, task: str) -> bool:
        return task in self._suspects

    def drop_if_done(self, run: AgentRun) -> None:
        """Drop a run if no process of it is left and its outcome is stored elsewhere."""
        if not (run.is_gone and run.forgotten):
            return
        self.runs.pop(run.key, None)
        if run.order.leases:
            self._gone.append(run.reports["gone"])

    def runner_of(self, key: RunKey) -> str:
        """Return the name of the actor that has this run; empty if no actor has it."""
        run = self.runs.get(key)
        return "" if run is None or run.process is None or run.has_ended else run.process.name

    @property
    def is_idle(self) -> bool:
        return all(run.has_ended or run.is_gone for run in self.runs.values())

    def alive_with_leases(self) -> dict[str, tuple[ProcessId, tuple[tuple[str, int], ...]]]:
        """Return the process and the leases of each run that holds device memory."""
        return {
            str(run.key): (run.process.watched.id, run.order.leases)
            for run in self.runs.values()
            if run.order.leases and run.process is not None and not run.process.watched.ended
        }

    @property
    def keeps_outcomes(self) -> bool:
        """True if some run has ended and only this agent knows how."""
        return any(run.has_ended and not run.forgotten for run in self.runs.values())

    @property
    def has_processes(self) -> bool:
        return any(run.process is not None for run in self.runs.values())

    def was_stopped(self, report: Report) -> bool:
        """Return True if this is the report of the end or the absence of a run that did not end by itself."""
        run = self.runs.get(RunKey(*report[1:4])) if report[0] in ("ended", "gone") else None
        end = None if run is None else run.reports.get("ended")
        return end is not None and (end[5] in ("stopped", "lost") or end[10:] == (True,))

    def gone_report(self, key: RunKey) -> Report | None:
        """Return the last report of a run that was dropped not long ago."""
        return next((report for report in self._gone if report[1:4] == key), None)

    def all_reports(self) -> Iterator[Report]:
        """Yield all reports for a leader that may have received none of them. The reports of a run come in
        the order of its states."""
        yield from self._gone
        for run in self.runs.values():
            for kind in ("started", "ready", "checkpointed", "items", "part", "ended", "gone"):
                if kind in run.reports:
                    yield run.reports[kind]


def own_start(order: RunOrder, config: AgentConfig, log: Path, host: str) -> tuple[Any, ...]:
    """Return the order to start a run in a process that runs nothing else."""
    return ("own", order.to_wire(), config.instance, str(log), config.task_user, host, config.node)


def gone(key: RunKey, proof: str, samples: Sequence[WireSample] = ()) -> Report:
    return ("gone", *key, time.time(), proof, tuple(samples))


def how_it_ended(exit_status: int | None) -> str:
    """Return a sentence about a process that ended without reporting the end of its run. `exit_status` is
    the status that `os.wait` returns."""
    if exit_status is None:
        return "its process ended without a report: it was killed or it crashed"
    code = os.waitstatus_to_exitcode(exit_status)
    if code >= 0:
        return f"its process ended with exit code {code} before the function returned, as by os._exit({code})"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    hint = " (the kernel does this when memory is short)" if -code == signal.SIGKILL else ""
    return f"its process was ended by signal {name}{hint}"


async def over_memory_limit(runs: Collection[AgentRun], process_mb: int) -> list[RunnerProcess]:
    """Return the runners that take more host memory than allowed, and set their `breach`. The limit of a
    runner and its children together is the memory that the run asked for; if it asked for none, each of
    these processes may take `process_mb`."""
    watched = {
        run.process.watched.id.pid: (run.process, 0 if run.shared else run.order.memory_mb)
        for run in runs
        if run.process is not None and not run.process.breach
    }
    over_limit = []
    for pid, taken_mb in (await asyncio.to_thread(private_mb_below, watched)).items():
        process, asked_mb = watched[pid]
        process.breach = "" if process.watched.ended else _breach(taken_mb, asked_mb, process_mb)
        if process.breach:
            log.warning("a run takes too much host memory", runner=process.name, fault=process.breach)
            over_limit.append(process)
    return over_limit


def _breach(taken_mb: Sequence[int], asked_mb: int, process_mb: int) -> str:
    if asked_mb and sum(taken_mb) > asked_mb + RUNNER_MB:
        return f"it took {sum(taken_mb)} MiB of host memory and asked for {asked_mb} MiB; {REMEDY}"
    if not asked_mb and max(taken_mb) > process_mb:
        return (
            f"one of its processes took {max(taken_mb)} MiB of host memory, and each may take {process_mb} "
            "MiB here, unless the task asks for more as memory_mb (the setting is ray.process_memory_mb)"
        )
    return ""
