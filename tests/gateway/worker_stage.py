"""Workers of sets for the tests of their calls: the real ones, in threads of this process."""

import asyncio
import json
import sys
import threading
from typing import Any

import cloudpickle
from gpubroker.runtime.calls import SetWorker
from gpubroker.runtime.host import RunHost
from gpubroker.runtime.journal import Journal
from gpubroker.runtime.messages import RunKey, RunOrder
from gpubroker_server.adapters.ray.driver.worker_calls import answer_of
from gpubroker_server.adapters.ray.wire import pack
from gpubroker_server.core.domain.submission import told_variables
from gpubroker_server.core.domain.units import Seconds, TaskId
from gpubroker_server.ports.worker_calls import CallAnswer, NotBegun, WorkerCall, WorkerLost, WorkerRun

from tests.gateway.harness import Client, Gateway
from tests.patience import PATIENCE_SECONDS

RUN = {"entrypoint": "myteam.solvers:Solver", "kwargs": {"start": 10}}
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


class Solver:
    def __init__(self, start: int) -> None:
        self.value = start
        self.goes_on = threading.Event()
        self.has_begun = threading.Event()

    def add(self, number: int) -> int:
        self.value += number
        return self.value

    def wait(self) -> int:
        self.has_begun.set()
        assert self.goes_on.wait(PATIENCE_SECONDS)
        return self.value

    def fail(self) -> None:
        raise ValueError("no")


class Workers:
    """The processes of workers, as an executor would have them."""

    def __init__(self) -> None:
        self.hosts: dict[tuple[TaskId, int], RunHost] = {}
        self.away: set[tuple[TaskId, int]] = set()
        """Runs of which no process is found."""
        self.solvers: dict[TaskId, Solver] = {}
        self.lost: asyncio.Event = asyncio.Event()
        self.hangs: asyncio.Event | None = None
        """Until it is set, no call is answered."""
        self.refuses: set[str] = set()
        """Workers that take no call, though they are ready."""

    async def start(self, gateway: Gateway, task_id: str) -> None:
        await gateway.admit(task_id)
        task = gateway.task(task_id)
        spec = (await gateway.store.specs([task.id]))[task.id]
        solver = self.solvers[task.id] = Solver(**json.loads(spec.arguments)["kwargs"])
        host = self.hosts[task.id, task.fence] = RunHost(Journal(lambda _delay: None))
        SOLVERS[task.id] = solver
        host.start_shared(
            RunOrder(
                task=task.id,
                fence=task.fence,
                kind="function",
                python=PYTHON,
                arguments=cloudpickle.dumps((solver_of, (task.id,), {})),
                env={**spec.env, **told_variables(spec)},
            )
        )

    async def call(self, run: WorkerRun, call: WorkerCall, seconds: Seconds) -> CallAnswer:
        is_away = (run.task, run.fence) in self.away
        host = None if is_away else self.hosts.get((run.task, run.fence))
        worker = None if host is None else host.set_workers.get(RunKey(run.task, run.fence, 0))
        if worker is None:
            return NotBegun("it is not here")
        if call.method and run.task in self.refuses:
            return NotBegun("it is leaving")
        return await self._answer(worker, call, seconds)

    async def _answer(self, worker: SetWorker, call: WorkerCall, seconds: Seconds) -> CallAnswer:
        if call.method and self.hangs is not None:
            await self.hangs.wait()
        answered = asyncio.create_task(worker.call(*call, seconds))
        lost = asyncio.create_task(self.lost.wait())
        await asyncio.wait({answered, lost}, return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        return answer_of(pack(answered.result()), call.form) if answered.done() else WorkerLost("killed")

    def end(self) -> None:
        for solver in self.solvers.values():
            solver.goes_on.set()
        for (task, fence), host in self.hosts.items():
            host.stop(RunKey(task, fence, 0))


SOLVERS: dict[str, Solver] = {}


def solver_of(task: str) -> Solver:
    return SOLVERS[task]


async def formed(gateway: Gateway, api: Client, **fields: Any) -> dict[str, Any]:
    body = {"run": RUN, "resources": {"cpu": 0.1}, **fields}
    answer = await api.post("/worker-sets", json=body)
    assert answer.status_code == 202, answer.text
    await gateway.turn()
    return dict((await api.get(answer.headers["Location"])).json())


async def running(gateway: Gateway, api: Client, workers: Workers, count: int = 1, **more: Any) -> Any:
    """A set with so many workers at work."""
    seen = await formed(gateway, api, count=count, **more)
    for worker in seen["workers"][:count]:
        await workers.start(gateway, worker["id"])
    return seen
