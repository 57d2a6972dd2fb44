"""Where a call to a worker set goes: the workers that are ready, and how many calls each has from here."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from time import monotonic
from typing import NamedTuple

from gpubroker_server.core.domain.submission import WorkerSet
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Position, Seconds, TaskId
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.http.problems import Fault, Problem
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

MADE = WorkerCall("", "", "json", b"")
"""The question whether a worker is ready."""
MADE_SECONDS = Seconds(3600.0)
"""It may load a large model first; then it is asked again."""
LOOK_SECONDS = 0.1
"""While calls wait for a worker, the set is looked at again this often."""
MOST_WAITING = 1000
"""Beyond what it works on, a worker has at most so many calls from one gateway."""


class Answered(NamedTuple):
    by: WorkerRun
    answer: Called


class Fleets:
    """The workers of all sets that were called through this gateway."""

    def __init__(self, world: World, calls: WorkerCalls | None) -> None:
        self._world = world
        self._calls = calls
        self._fleets: dict[TaskId, _Fleet] = {}

    async def call(self, workers: WorkerSet, call: WorkerCall, seconds: Seconds, routing: str) -> Answered:
        """By one worker; what it refuses goes to another one. Raises Problem."""
        if self._calls is None:
            raise Problem("no-ray-driver")
        fleet = self._fleets.get(workers.id)
        if fleet is None:
            self._drop_what_is_over()
            fleet = self._fleets[workers.id] = _Fleet(self._world, self._calls, workers.id)
        until = monotonic() + seconds
        while (run := await fleet.choose(workers, routing, until)) is not None:
            left = Seconds(max(0.0, until - monotonic()))
            try:
                answer = await fleet.send(run, call, left)
            except TimeoutError:
                detail = f"worker {run.task} did not answer within {seconds:g} s; the method may go on there"
                raise Problem("call-timeout", detail) from None
            match answer:
                case Called():
                    return Answered(run, answer)
                case NotBegun(is_late=True):
                    detail = f"the call waited at worker {run.task} for {seconds:g} s, and has not begun"
                    raise Problem("call-timeout", detail)
                case NotBegun():
                    fleet.lose(run)
                case MethodFailed():
                    raise _failed(run, call, answer)
                case WorkerLost():
                    fleet.lose(run)
                    raise Problem("worker-lost", worker=run.task, attempt=run.fence, why=answer.why)
        states = ", ".join(f"{count} {state}" for state, count in states_of(workers, self._world).items())
        states = (states or "none is left") + (f" ({fleet.refusal})" if fleet.refusal else "")
        raise Problem("no-worker", set=workers.id, task=workers.id, states=states, seconds=f"{seconds:g}")

    def _drop_what_is_over(self) -> None:
        for name in [name for name in self._fleets if name not in self._world.worker_sets]:
            self._fleets.pop(name).close()


def states_of(workers: WorkerSet, world: World) -> Mapping[str, int]:
    """How many workers are in which state; of those that are not wanted now: `held`."""
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


class _Fleet:
    """The workers of one set. Those that are RUNNING are asked whether they are ready, once per attempt."""

    def __init__(self, world: World, calls: WorkerCalls, id: TaskId) -> None:
        self._world = world
        self._calls = calls
        self._id = id
        self._seen: Position | None = None
        self._ready: dict[TaskId, WorkerRun] = {}
        self._asked: dict[WorkerRun, asyncio.Task[None]] = {}
        self._open: Counter[WorkerRun] = Counter()
        """Calls under way from here."""
        self._turn = 0
        self._came = asyncio.Event()
        self.refusal = ""
        """Why a worker that runs was last not to be reached, until one is ready."""

    async def choose(self, workers: WorkerSet, routing: str, until: float) -> WorkerRun | None:
        """The worker whose turn it is; None if none is ready in time. Raises Problem worker-queue-full."""
        while True:
            self._look()
            if self._ready:
                return self._least_busy(workers, routing)
            if (left := until - monotonic()) <= 0:
                return None
            self._came.clear()
            try:
                async with asyncio.timeout(min(left, LOOK_SECONDS)):
                    await self._came.wait()
            except TimeoutError:
                self._seen = None

    async def send(self, run: WorkerRun, call: WorkerCall, seconds: Seconds) -> CallAnswer:
        self._open[run] += 1
        try:
            return await self._calls.call(run, call, seconds)
        finally:
            self._open[run] -= 1
            if not self._open[run]:
                del self._open[run]

    def lose(self, run: WorkerRun) -> None:
        """Ask it again before it gets another call."""
        if self._ready.get(run.task) == run:
            del self._ready[run.task]
            self._seen = None

    def close(self) -> None:
        for asking in self._asked.values():
            asking.cancel()

    def _least_busy(self, workers: WorkerSet, routing: str) -> WorkerRun:
        """In turn; unless that is all that is asked for, among those with the fewest calls from here."""
        runs = list(self._ready.values())
        self._turn += 1
        start = self._turn % len(runs)
        in_turn = runs[start:] + runs[:start]
        run = in_turn[0] if routing == "round_robin" else min(in_turn, key=self._open.__getitem__)
        most = workers.max_concurrency + MOST_WAITING
        if self._open[run] >= most:
            raise Problem("worker-queue-full", set=workers.id, waiting=most, workers=len(runs))
        return run

    def _look(self) -> None:
        """After each change of the World."""
        if self._seen == self._world.position:
            return
        self._seen = self._world.position
        known = self._world.worker_sets.get(self._id)
        rows = (self._world.tasks.get(worker) for worker in (known.workers if known else ()))
        runs = [
            WorkerRun(row.node, row.id, row.fence)
            for row in rows
            if row is not None and row.state is TaskState.RUNNING and row.node is not None
        ]
        self._ready = {run.task: run for run in runs if self._ready.get(run.task) == run}
        for run in runs:
            if run.task not in self._ready and run not in self._asked:
                self._asked[run] = asyncio.create_task(self._ask(run))
        for gone in set(self._asked) - set(runs):
            self._asked.pop(gone).cancel()

    async def _ask(self, run: WorkerRun) -> None:
        try:
            match await self._calls.call(run, MADE, MADE_SECONDS):
                case Called():
                    self._ready[run.task] = run
                    self.refusal = ""
                    self._came.set()
                case NotBegun(why) | WorkerLost(why):
                    self.refusal = why
        except TimeoutError:
            pass
        finally:
            self._asked.pop(run, None)
