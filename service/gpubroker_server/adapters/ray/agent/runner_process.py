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
"""Host memory that a run does not pay for: what a runner takes before any user code runs."""
REMEMBERED_FENCES = 100_000
REMEMBERED_RUNS = 1024


async def retry_until_done(job: str, attempt: Callable[[], Awaitable[None]]) -> None:
    """Run `attempt` from the beginning, less and less often, until it succeeds. Each failure is logged."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return await attempt()
        except Exception:
            log.exception("what must be done failed; trying again", job=job)
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


async def describe(actor: Any, timeout_seconds: float) -> dict[str, Any]:
    """Ask a runner about itself. The answer has `protocol`, the newest form that both sides speak. Raises
    RayError, TimeoutError, or ValueError if they share no form."""
    async with asyncio.timeout(timeout_seconds):
        described: dict[str, Any] = unpack(await actor.describe.remote())
    protocol = newest_shared(described["speaks"])
    if protocol is None:
        raise ValueError(f"it speaks protocols {described['speaks']}, this agent {SPOKEN}")
    return described | {"protocol": protocol}


class RunnerProcess:
    """One runner process and the conversation with it.

    `on_report` gets every report once, in order. `on_end` is called when the process is gone and no more
    reports will come; again, if it raised.
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
        """Raise ProcessLookupError if the process is gone."""
        self.name = name
        self.shared = shared
        self.protocol = protocol
        self.runs: set[RunKey] = set()
        """Runs that have not ended."""
        self.retiring = False
        self.out_of_memory = False
        self.breach = ""
        """The reason why the agent ends the process, if it took more host memory than it may have."""
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
        """Send orders; those of one turn of the event loop travel together. A process of an earlier release
        does not learn that ranks have joined."""
        items = tuple(item for item in items if item[0] != "resized" or self.protocol >= RESIZES)
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._send_waiting)
        self._waiting += items

    def listen_again(self, *items: tuple[Any, ...]) -> None:
        """Get every report that the process still keeps: for an agent that did not start it."""
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
            # Usually its process has just ended. One that lives but cannot be talked to is of no use.
            log.info("a runner is lost", runner=self.name, fault=str(fault))
            self.watched.signal(signal.SIGKILL)
        except Exception:
            # No further report of it would be received, not even the ends of its runs.
            log.exception("a runner's reports cannot be read; ending it", runner=self.name)
            self.watched.signal(signal.SIGKILL)
        else:
            if number == self._calls and self.runs:
                self._call([])

    def _receive(self, reply: Sequence[tuple[int, Report]]) -> None:
        """A later call's reply may come first: reports wait for those that were written before them."""
        self._early.update((number, report) for number, report in reply if number > self._received)
        if self._received == START_OVER and self._early:
            self._received = min(self._early) - 1
        while (report := self._early.pop(self._received + 1, None)) is not None:
            self._received += 1
            self._on_report(self, report)

    def _note_end(self) -> None:
        self._keep(self._finish())

    async def _finish(self) -> None:
        """Report the end of the process. Its last reports may still be on their way when it is gone."""
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
    """The process; None while the run waits for one, and once that process is gone."""
    reports: dict[str, Report] = field(default_factory=dict)
    """The newest report of each kind: started, ready, checkpointed, items, part, ended and gone."""
    forgotten: bool = False
    go: str = ""
    """The address of rank 0, once all ranks are ready; passed on to the process that the run gets."""
    killed: str = ""
    """The reason why its process was killed; empty if it was not."""
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
    """The runs that the agent has, those that are gone, and the fences that it must not start again."""

    def __init__(self) -> None:
        self.runs: dict[RunKey, AgentRun] = {}
        self._fences: OrderedDict[tuple[str, int], int] = OrderedDict()
        """(task, rank) -> highest fence seen, least recently used first."""
        self._gone: deque[Report] = deque(maxlen=REMEMBERED_RUNS)
        self._suspects: OrderedDict[str, None] = OrderedDict()

    def is_new(self, key: RunKey) -> bool:
        return key.fence > self._fences.get((key.task, key.rank), 0)

    def note_fence(self, key: RunKey) -> None:
        """Note that neither this fence nor a lower one of the task is new from now on."""
        name = (key.task, key.rank)
        self._fences[name] = max(key.fence, self._fences.get(name, 0))
        self._fences.move_to_end(name)
        if len(self._fences) > REMEMBERED_FENCES:
            self._fences.popitem(last=False)

    def suspect(self, task: str) -> None:
        """Note that the run may have crashed a process that it shared; it gets one of its own next time."""
        self._suspects[task] = None
        if len(self._suspects) > REMEMBERED_RUNS:
            self._suspects.popitem(last=False)

    def is_suspect(self, task: str) -> bool:
        return task in self._suspects

    def drop_if_done(self, run: AgentRun) -> None:
        """A run is kept until no process of it is left and its outcome is durable elsewhere."""
        if not (run.is_gone and run.forgotten):
            return
        self.runs.pop(run.key, None)
        if run.order.leases:
            self._gone.append(run.reports["gone"])

    def runner_of(self, key: RunKey) -> str:
        """The name of the actor that has this run; empty if none has."""
        run = self.runs.get(key)
        return "" if run is None or run.process is None or run.has_ended else run.process.name

    @property
    def is_idle(self) -> bool:
        return all(run.has_ended or run.is_gone for run in self.runs.values())

    def alive_with_leases(self) -> dict[str, tuple[ProcessId, tuple[tuple[str, int], ...]]]:
        """Process and leases of the runs that hold device memory."""
        return {
            str(run.key): (run.process.watched.id, run.order.leases)
            for run in self.runs.values()
            if run.order.leases and run.process is not None and not run.process.watched.ended
        }

    @property
    def keeps_outcomes(self) -> bool:
        """True if only this agent knows how some run has ended: its process is gone, or soon will be."""
        return any(run.has_ended and not run.forgotten for run in self.runs.values())

    @property
    def has_processes(self) -> bool:
        return any(run.process is not None for run in self.runs.values())

    def was_stopped(self, report: Report) -> bool:
        """Return True if the report says the end, or the absence, of a run that did not end by itself."""
        run = self.runs.get(RunKey(*report[1:4])) if report[0] in ("ended", "gone") else None
        end = None if run is None else run.reports.get("ended")
        return end is not None and (end[5] in ("stopped", "lost") or end[10:] == (True,))

    def gone_report(self, key: RunKey) -> Report | None:
        """Return the last report of a run that was dropped not long ago."""
        return next((report for report in self._gone if report[1:4] == key), None)

    def all_reports(self) -> Iterator[Report]:
        """Yield all reports for a leader that may have received none of them: per run in the order of its
        states."""
        yield from self._gone
        for run in self.runs.values():
            for kind in ("started", "ready", "checkpointed", "items", "part", "ended", "gone"):
                if kind in run.reports:
                    yield run.reports[kind]


def own_start(order: RunOrder, config: AgentConfig, log: Path, host: str) -> tuple[Any, ...]:
    """The order to start a run in a process that runs nothing else."""
    return ("own", order.to_wire(), config.instance, str(log), config.task_user, host, config.node)


def gone(key: RunKey, proof: str, samples: Sequence[WireSample] = ()) -> Report:
    return ("gone", *key, time.time(), proof, tuple(samples))


def how_it_ended(exit_status: int | None) -> str:
    """Return the sentence about a process that has reported no end of its run; `exit_status` is what
    `os.wait` returns."""
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
    """Return the runners that take more host memory than they may have: together what their run asked for, or
    `process_mb` in one process if it asked for nothing. Sets their `breach`."""
    watched = {
        run.process.watched.id.pid: (run.process, 0 if run.shared else run.order.memory_mb)
        for run in runs
        if run.process is not None and not run.process.breach
    }
    found = []
    for pid, taken_mb in (await asyncio.to_thread(private_mb_below, watched)).items():
        process, asked_mb = watched[pid]
        process.breach = "" if process.watched.ended else _breach(taken_mb, asked_mb, process_mb)
        if process.breach:
            log.warning("a run takes too much host memory", runner=process.name, fault=process.breach)
            found.append(process)
    return found


def _breach(taken_mb: Sequence[int], asked_mb: int, process_mb: int) -> str:
    if asked_mb and sum(taken_mb) > asked_mb + RUNNER_MB:
        return f"it took {sum(taken_mb)} MiB of host memory and asked for {asked_mb} MiB; {REMEDY}"
    if not asked_mb and max(taken_mb) > process_mb:
        return (
            f"one of its processes took {max(taken_mb)} MiB of host memory, and each may take {process_mb} "
            "MiB here, unless the task asks for more as memory_mb (the setting is ray.process_memory_mb)"
        )
    return ""
