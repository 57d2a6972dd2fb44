"""Routes calls to the ready workers of a worker set, by the number of calls that each has from this
gateway."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from time import monotonic
from typing import NamedTuple

from gpubroker_server.core.domain.submission import WorkerSet
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Position, Seconds, TaskId
from gpubroker_server.core.world.world import World
from gpubroker_server.http.problems import Fault, Problem
from gpubroker_server.http.waiters import Waiters
from gpubroker_server.ports.worker_calls import (
    CallAnswer,
    Called,
    MethodFailed,
    NotBegun,
    WorkerCall,
    WorkerCalls,
    WorkerLost,
    WorkerRun,
)

IS_READY = WorkerCall("", "", "json", b"")
"""The call that asks a worker whether it is ready."""
READY_SECONDS = Seconds(3600.0)
"""How long a worker may take to answer whether it is ready, because it may load a large model first. After
that it is asked again."""
ANSWER_SHARE, ANSWER_SECONDS = 0.1, 1.0
"""A worker must begin a call by this share of the call's time, but at most ANSWER_SECONDS, before the gateway
gives the call up. This leaves the worker time to report that it has not begun the call."""
LOOK_SECONDS = 0.1
"""The interval at which the World is read while calls wait for a worker."""
MAX_WAITING = 1000
"""The largest number of calls from one gateway that wait in a worker, beside the calls that it works on."""
MAX_BYTES = 64 * 2**20
"""The largest total size of the arguments that a worker has from one gateway, unless it has a single call."""


class Answered(NamedTuple):
    by: WorkerRun
    answer: Called


class CallRouter:
    """Sends the calls of this gateway to the workers of all sets."""

    def __init__(self, world: World, calls: WorkerCalls | None, waiters: Waiters) -> None:
        self._world = world
        self._waiters = waiters
        self._calls = calls
        self._sets: dict[TaskId, WorkersOfSet] = {}

    async def call(self, workers: WorkerSet, call: WorkerCall, seconds: Seconds, routing: str) -> Answered:
        """Have a worker of the set execute the call, and return its answer. A call that a worker refuses goes
        to another worker. Raises Problem if no worker answers, or if the method fails."""
        if self._calls is None:
            raise Problem("no-ray-driver")
        choice = self._sets.get(workers.id)
        if choice is None:
            self._drop_ended_sets()
            choice = WorkersOfSet(self._world, self._calls, self._waiters, workers.id)
            self._sets[workers.id] = choice
        to_begin = seconds - min(ANSWER_SECONDS, seconds * ANSWER_SHARE)
        begins_by, ends_by = monotonic() + to_begin, monotonic() + seconds
        while (run := await choice.choose(workers, len(call.arguments), routing, begins_by)) is not None:
            try:
                async with asyncio.timeout(ends_by - monotonic()):
                    answer = await choice.send(run, call, begins_by)
            except TimeoutError:
                detail = f"worker {run.task} did not answer within {seconds:g} s; the method may go on there"
                raise Problem("call-timeout", detail) from None
            match answer:
                case Called():
                    return Answered(run, answer)
                case NotBegun(reason, is_late=True):
                    detail = (
                        f"worker {run.task} did not begin within {to_begin:g} s, and never will: {reason}"
                    )
                    raise Problem("call-timeout", detail)
                case NotBegun(reason):
                    choice.lose(run, reason)
                case MethodFailed():
                    raise _failed(run, call, answer)
                case WorkerLost(reason):
                    choice.lose(run, reason)
                    raise Problem("worker-lost", worker=run.task, attempt=run.fence, why=reason)
        states = ", ".join(f"{count} {state}" for state, count in states_of(workers, self._world).items())
        states = (states or "none is left") + (f" ({choice.refusal})" if choice.refusal else "")
        raise Problem("no-worker", set=workers.id, task=workers.id, states=states, seconds=f"{to_begin:g}")

    def _drop_ended_sets(self) -> None:
        for name in [name for name in self._sets if name not in self._world.worker_sets]:
            self._sets.pop(name).close()


def states_of(workers: WorkerSet, world: World) -> Mapping[str, int]:
    """Return the number of workers in each state. Workers that are not wanted now count as `held`."""
    rows = (world.tasks.get(worker) for worker in workers.workers)
    return Counter(
        "held" if row.held and row.state is TaskState.PENDING else str(row.state)
        for row in rows
        if row is not None and not row.is_terminal
    )


def _failed(run: WorkerRun, call: WorkerCall, failure: MethodFailed) -> Problem:
    detail = f"{call.method} failed in worker {run.task}: {failure.message}"
    trace = Fault(pointer="", detail=failure.traceback or failure.message, code=failure.kind)
    return Problem("call-failed", detail, errors=[trace])


class WorkersOfSet:
    """The workers of one set. A worker that is RUNNING is asked whether it is ready, once per attempt."""

    def __init__(self, world: World, calls: WorkerCalls, waiters: Waiters, id: TaskId) -> None:
        self._world = world
        self._waiters = waiters
        self._calls = calls
        self._id = id
        self._seen: Position | None = None
        self._ready: dict[TaskId, WorkerRun] = {}
        self._asked: dict[WorkerRun, asyncio.Task[None]] = {}
        self._open: Counter[WorkerRun] = Counter()
        """Worker -> the number of calls from this gateway that it has not answered."""
        self._open_bytes: Counter[WorkerRun] = Counter()
        """Worker -> the total size of the arguments of the calls that `_open` counts."""
        self._turn = 0
        self._came = asyncio.Event()
        self.refusal = ""
        """The reason why a call last failed to reach a running worker; empty once a worker is ready."""

    async def choose(
        self, workers: WorkerSet, size_bytes: int, routing: str, until: float
    ) -> WorkerRun | None:
        """Return the worker that gets a call of this size; None if no worker is ready in time. Raises Problem
        worker-queue-full or tenant-waits."""
        self._look()
        if not self._ready:
            with self._waiters.expect_for(workers.tenant, f"{workers.id} ready"):
                await self._until_ready(until)
        if not self._ready or monotonic() >= until:
            return None
        return self._least_busy(workers, size_bytes, routing)

    async def _until_ready(self, until: float) -> None:
        while not self._ready:
            if (left := until - monotonic()) <= 0:
                return
            self._came.clear()
            try:
                async with asyncio.timeout(min(left, LOOK_SECONDS)):
                    await self._came.wait()
            except TimeoutError:
                self._seen = None
            self._look()

    async def send(self, run: WorkerRun, call: WorkerCall, begins_by: float) -> CallAnswer:
        """Send the call to a worker, and return the answer. The call counts as open until the worker has
        answered, even if the caller is cancelled before."""
        to_begin = Seconds(max(0.0, begins_by - monotonic()))
        answering = asyncio.ensure_future(self._calls.call(run, call, to_begin))
        size_bytes = len(call.arguments)
        self._count(run, 1, size_bytes)
        answering.add_done_callback(lambda _: self._count(run, -1, -size_bytes))
        return await asyncio.shield(answering)

    def lose(self, run: WorkerRun, why: str) -> None:
        """Send the worker no more calls until it has answered again that it is ready."""
        self.refusal = why
        if self._ready.get(run.task) == run:
            del self._ready[run.task]
            self._seen = None

    def close(self) -> None:
        for asking in self._asked.values():
            asking.cancel()

    def _count(self, run: WorkerRun, more: int, more_bytes: int) -> None:
        self._open[run] += more
        self._open_bytes[run] += more_bytes
        if not self._open[run]:
            del self._open[run], self._open_bytes[run]

    def _least_busy(self, workers: WorkerSet, size_bytes: int, routing: str) -> WorkerRun:
        """Return the next worker in turn. Unless `routing` is `round_robin`, only the workers with the fewest
        open calls from this gateway take turns. Raises Problem worker-queue-full."""
        runs = list(self._ready.values())
        self._turn += 1
        start = self._turn % len(runs)
        in_turn = runs[start:] + runs[:start]
        limit = workers.max_concurrency + MAX_WAITING
        free = [
            run
            for run in in_turn
            if not self._open[run]
            or (self._open[run] < limit and self._open_bytes[run] + size_bytes <= MAX_BYTES)
        ]
        if not free:
            waits = f"{limit} calls, or {MAX_BYTES >> 20} MiB of arguments"
            raise Problem("worker-queue-full", set=workers.id, most=waits, workers=len(runs))
        return free[0] if routing == "round_robin" else min(free, key=self._open.__getitem__)

    def _look(self) -> None:
        """Read from the World which workers run, once after each change of the World."""
        if self._seen == self._world.position:
            return
        self._seen = self._world.position
        current = self._world.worker_sets.get(self._id)
        rows = (self._world.tasks.get(worker) for worker in (current.workers if current else ()))
        runs = [
            WorkerRun(row.node, row.id, row.fence)
            for row in rows
            if row is not None and row.state is TaskState.RUNNING and row.node is not None
        ]
        self._ready = {run.task: run for run in runs if self._ready.get(run.task) == run}
        for run in runs:
            if run.task not in self._ready and run not in self._asked:
                self._asked[run] = asyncio.create_task(self._ask(run))
        for ended in set(self._asked) - set(runs):
            self._asked.pop(ended).cancel()

    async def _ask(self, run: WorkerRun) -> None:
        try:
            match await self._calls.call(run, IS_READY, READY_SECONDS):
                case Called():
                    self._ready[run.task] = run
                    # The next `_look` puts the worker into the order of the set: the order of turns is fixed.
                    self._seen = None
                    self.refusal = ""
                    self._came.set()
                case NotBegun(reason, is_late=False) | WorkerLost(reason):
                    self.refusal = reason
        finally:
            self._asked.pop(run, None)
