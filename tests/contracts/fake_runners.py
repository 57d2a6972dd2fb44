"""Runners without Ray: each is a real process that does nothing; the test writes its reports."""

import asyncio
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from gpubroker.runtime.mailbox import Mailbox
from gpubroker.runtime.messages import PROTOCOL, Report, RunOrder
from gpubroker_server.adapters.ray.agent.host_meter import RaySession
from gpubroker_server.adapters.ray.agent.node_agent import NodeAgent
from gpubroker_server.adapters.ray.agent.runner_pool import RunnerPool
from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.processes import WatchedProcess, process_id
from gpubroker_server.adapters.ray.wire import PROTOCOL as AGENT_PROTOCOL
from gpubroker_server.adapters.ray.wire import pack, unpack
from ray.exceptions import RayActorError

from tests.patience import PATIENCE_SECONDS

GPU = "GPU-sim-0"


def an_agent_config(run_dir: Path, **changes: Any) -> AgentConfig:
    given: dict[str, Any] = {
        "node": "n1",
        "instance": "test",
        "devices": ((GPU, "simulated", 0, 24_000, ""),),
        "spares": 0,
        "warm_runners": 0,
        "cpu": 4.0,
        "memory_mb": 1000,
        "max_runs": 10,
        "process_memory_mb": 81_920,
        "task_path": (),
        "task_user": "",
        "run_dir": str(run_dir / "runs"),
        "sample_period_seconds": 60.0,
        "beat_seconds": 60.0,
        "idle_stop_seconds": 600.0,
        "keepalive": "",
        "work_dir": str(run_dir / "work"),
    }
    return AgentConfig(**{**given, **changes})


class _Method:
    """A method of an actor's handle."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def remote(self, *arguments: Any) -> "asyncio.Future[Any]":
        return asyncio.ensure_future(self._method(*arguments))


class Runner:
    """One handle. `items` are the orders that it got; `report` writes reports of its process."""

    def __init__(self, name: str, shared: bool, started: list[str]) -> None:
        self.name = name
        self.shared = shared
        self._started = started
        self.process = subprocess.Popen(["sleep", "600"])
        self.items: list[Any] = []
        self.runs: list[RunOrder] = []
        self.answers = asyncio.Event()
        """Until it is set it does not describe itself."""
        self.answers.set()
        self.speaks: tuple[int, ...] = (PROTOCOL,)
        self.protocols: set[int] = set()
        """Spoken by the agent."""
        self.describe = _Method(self._describe)
        self.exchange = _Method(self._exchange)
        self._mailbox: Mailbox | None = None

    def become(self, process: "subprocess.Popen[bytes]") -> None:
        """Before it is told anything: run as this process."""
        self.process.kill()
        self.process.wait()
        self.process = process

    def tasks(self) -> list[str]:
        """Those that it was told to start."""
        return [item[1]["task"] for item in self.items if item[0] in ("own", "share")]

    def report(self, *reports: Report) -> None:
        assert self._mailbox is not None
        for report in reports:
            self._mailbox.journal.add(report)

    async def _describe(self) -> bytes:
        await self.answers.wait()
        runs = [order.to_wire() for order in self.runs]
        who = {"pid": self.process.pid, "shared": self.shared, "runs": runs}
        return pack({"speaks": self.speaks, **who})

    async def _exchange(self, protocol: int, acknowledged: int, items: Any) -> bytes:
        if protocol not in self.speaks:
            raise RayActorError
        self.protocols.add(protocol)
        self._mailbox = self._mailbox or Mailbox()
        self.items += items
        self._started += [item[1]["task"] for item in items if item[0] in ("own", "share")]
        try:
            watched = WatchedProcess(process_id(self.process.pid))
        except ProcessLookupError:
            raise RayActorError from None
        reading = asyncio.ensure_future(self._mailbox.read(acknowledged, may_come=lambda: True))
        ended = asyncio.ensure_future(watched.wait())
        await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        watched.close()
        if not reading.done():
            reading.cancel()
            raise RayActorError
        return pack(reading.result())


class FakeRunners:
    """In place of `runner_pool.RayRunners`."""

    def __init__(self) -> None:
        self.node = "a Ray node"
        self.host = "10.0.0.1"
        self.object_cache_bytes = 100
        self.session = RaySession(tempfile.gettempdir(), "", 100 * 2**20)
        self.shared: list[bytes] = []
        """What the agent has put where runs read it."""
        self.made: list[Runner] = []
        self.started: list[str] = []
        """Tasks, in the order in which a runner was told to start them."""
        self.gets_on = False
        """Processes that are starting make progress, as far as their node can see."""
        self.looks = 0
        """How often that was asked."""
        self.on_start: Callable[[Runner], None] = lambda _runner: None
        """What happens to each new one."""

    def make(self, *, shared: bool) -> tuple[str, Any]:
        runner = Runner(f"runner-{len(self.made)}", shared, self.started)
        self.on_start(runner)
        self.made.append(runner)
        return runner.name, runner

    def progress(self) -> float:
        self.looks += 1
        return self.looks if self.gets_on else 0.0

    def share(self, data: bytearray) -> int:
        self.shared.append(bytes(data))
        return len(self.shared)

    def names(self) -> list[str]:
        return [runner.name for runner in self.made if runner.process.poll() is None]

    def find(self, name: str) -> Any | None:
        return next((runner for runner in self.made if runner.name == name), None)

    def kill(self, runner: Any) -> None:
        runner.process.kill()

    def runner_of(self, task: str) -> Runner:
        """That was told to start it."""
        return next(r for r in self.made if task in r.tasks())

    def close(self) -> None:
        for runner in self.made:
            runner.process.kill()
            runner.process.wait()


class Leader:
    """A leader's conversation with one agent, with all reports in order."""

    def __init__(self, agent: NodeAgent, config: AgentConfig, term: int = 1, lineage: int = 0) -> None:
        self.agent = agent
        self.config = config
        self.lineage, self.term = lineage, term
        self.protocol = AGENT_PROTOCOL
        self.broker = "broker"
        self.incarnation = ""
        self.received: list[Report] = []
        self._acknowledged = 0

    async def announce(self) -> str:
        """The verdict."""
        asked = self.config.to_json()
        verdict: str
        detail: list[Any]
        verdict, *detail = await self.agent.announce(
            self.protocol, asked, self.broker, self.lineage, self.term
        )
        self._acknowledged = 0
        if verdict == "welcome":
            [self.incarnation] = detail
        return verdict

    async def start(self, task: str, *, shareable: bool = False, fence: int = 1, **order: Any) -> None:
        run = RunOrder(task=task, fence=fence, kind="entrypoint", **order)
        await self.order("start", self.incarnation, shareable, run.to_wire())

    async def stop(self, task: str, grace_seconds: float = 0.0) -> None:
        await self.order("stop", task, 1, 0, "cancel", grace_seconds)

    async def order(self, *order: Any) -> None:
        await self.agent.orders(self.protocol, self.lineage, self.term, pack([order]))

    async def receive(self, kind: str, task: str = "") -> Report:
        """The first report of this kind (about this task), as soon as it has come."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                for report in self.received:
                    if report[0] == kind and (not task or report[1] == task):
                        return report
                await self._poll()

    async def until_announced(self, true: Callable[[Report], bool]) -> Report:
        """The newest announcement, as soon as this holds for it."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                seen = [report for report in self.received if report[0] == "node_seen"]
                if seen and true(seen[-1]):
                    return seen[-1]
                await self._poll()

    async def until(self, true: Callable[[], Any]) -> None:
        """For what an agent does and does not tell."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not true():  # noqa: ASYNC110  # processes and files send no events
                await asyncio.sleep(0.005)

    async def until_noted(self, runner: Runner) -> None:
        """Until this one that was kept ready has ended, and the agent does nothing more about it."""
        await self.until(lambda: runner.process.poll() is not None)
        await self.until(lambda: runner.name not in [process.name for process in self.pool.ready])

    @property
    def pool(self) -> RunnerPool:
        """The agent's."""
        assert self.agent._runs is not None
        return self.agent._runs.pool

    def kinds_of(self, task: str) -> list[str]:
        return [report[0] for report in self.received if report[1] == task]

    async def _poll(self) -> None:
        if self._acknowledged < 0:  # the agent has ended the conversation
            await self.announce()
        self._acknowledged, packed = await self.agent.poll(self.incarnation, self._acknowledged, 10.0)
        if packed:
            self.received += unpack(packed)[-1]


def a_leader(runners: FakeRunners, folder: Path, **changes: Any) -> Leader:
    """To a new agent, with these changes of its configuration."""
    config = an_agent_config(folder, **changes)
    return Leader(NodeAgent(config.to_json(), cast("Any", runners)), config)
