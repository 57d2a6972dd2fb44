"""An executor and everything it reported, so that a test is its scenario and its claim."""

import asyncio
import json
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

from gpubroker_server.core.domain.device import NodeSample
from gpubroker_server.core.domain.leader_term import LeaderTerm
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import (
    Ended,
    Ending,
    ForgetOrder,
    Gone,
    GoOrder,
    Heartbeat,
    NodeLost,
    NodeReport,
    NodesListed,
    Order,
    Report,
    RunId,
    Sampled,
    StartOrder,
    StopOrder,
)
from gpubroker_server.core.domain.task import StopReason
from gpubroker_server.core.domain.units import DeviceKey, Fence, Lineage, Mib, Seconds, TaskId, Term
from gpubroker_server.ports.executor import Executor, RunPayload
from gpubroker_server.ports.store import RunSpec
from gpubroker_server.ports.task_objects import ObjectQuestion
from msgspec import Struct

from tests.patience import PATIENCE_SECONDS

GPU = DeviceKey("local/local/GPU-sim-0")
JOBS = "tests.e2e.ray_jobs"

Kind = TypeVar("Kind")


class Run(Struct, frozen=True):
    bench: "Bench"
    order: StartOrder

    @property
    def reports(self) -> list[Report | ObjectQuestion]:
        """What was reported of it, in order."""
        return self.bench.heard.get((self.order.task, self.order.fence, self.order.rank), [])

    async def first(self, kind: type[Kind]) -> Kind:
        try:
            found = await self.bench.until(
                lambda: next((r for r in self.reports if isinstance(r, kind)), None)
            )
        except TimeoutError as late:
            late.add_note(f"of {self.order.task} was heard: {self.reports}; {self.bench.situation()}")
            raise
        assert isinstance(found, kind)
        return found

    async def result(self) -> Any:
        """Of a run that must succeed; as JSON."""
        ended = await self.first(Ended)
        assert ended.ending == "succeeded", ended
        assert ended.result is not None
        return json.loads(ended.result)

    async def stop(self, grace_seconds: float) -> None:
        order = self.order
        await self.bench.send(
            StopOrder(
                order.task,
                order.fence,
                order.node,
                order.incarnation,
                StopReason.PREEMPT,
                Seconds(grace_seconds),
                order.rank,
            )
        )

    async def forget(self) -> None:
        order = self.order
        await self.bench.send(ForgetOrder(order.task, order.fence, order.node, order.incarnation, order.rank))

    async def go(self, rank_zero_address: str) -> None:
        order = self.order
        at = order.task, order.fence, order.node, order.incarnation
        await self.bench.send(GoOrder(*at, rank_zero_address, order.rank))

    def never_began(self) -> bool:
        """Each order to start it was answered so, and nothing else was reported of it."""
        answers = len(self.reports) // 2
        never = [Ending.NEVER_STARTED] * answers
        endings = [report.ending for report in self.reports if isinstance(report, Ended)]
        proofs = [report.proof for report in self.reports if isinstance(report, Gone)]
        return answers > 0 and (endings, proofs) == (never, [Proof.NEVER_STARTED] * answers)

    def order_of_kinds(self) -> list[str]:
        return [type(report).__name__ for report in self.reports]


class Bench:
    _numbers = count(1)

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.term = 0
        self.heard: dict[RunId, list[Report | ObjectQuestion]] = {}
        self.nodes: list[NodeReport | NodeLost] = []
        self.samples: list[Sampled] = []
        self.node_samples: list[NodeSample] = []
        self.beats: list[float] = []
        """When each was heard, in seconds of the event loop."""
        self._news = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None

    async def open(self, term: int = 1) -> None:
        self.term = term
        await self.executor.start(LeaderTerm(Term(term)), Lineage(0))
        self._listening = asyncio.create_task(self._listen())

    async def close(self, *, stop_cluster: bool = True) -> None:
        if self._listening is not None:
            self._listening.cancel()
        await self.executor.close(stop_cluster=stop_cluster)

    def situation(self) -> str:
        """What may tell why something was not heard."""
        return f"listening: {self._listening}; {len(self.beats)} beats; agents: {self.nodes[-3:]}"

    async def announce_again(self) -> NodeReport:
        """Begin another term; what the agent answers to that."""
        before = len(self.nodes)
        self.term += 1
        await self.executor.start(LeaderTerm(Term(self.term)), Lineage(0))
        seen = await self.until(lambda: [n for n in self.nodes[before:] if isinstance(n, NodeReport)])
        assert isinstance(seen[0], NodeReport)
        return seen[0]

    async def node(self) -> NodeReport:
        """The newest answer of an agent."""
        seen = await self.until(lambda: [node for node in self.nodes if isinstance(node, NodeReport)])
        newest: NodeReport = seen[-1]
        return newest

    async def start(
        self,
        name: str = "",
        *args: Any,
        shareable: bool = False,
        gpu_mb: int = 0,
        shares: tuple[tuple[Mib, float], ...] = (),
        memory_mb: int = 0,
        fence: int = 1,
        task: str = "",
        incarnation: str = "",
        resume_state: bytes | None = None,
        rank: int = 0,
        world_size: int = 1,
        **spec: Any,
    ) -> Run:
        """Order a run of `tests.e2e.ray_jobs:<name>`, or of whatever `spec` says."""
        seen = await self.node()
        given = {"kind": "entrypoint", "entrypoint": f"{JOBS}:{name}", **spec}
        order = StartOrder(
            task=TaskId(task or f"{name or given['kind']}-{next(self._numbers)}"),
            fence=Fence(fence),
            node=seen.node.name,
            incarnation=incarnation or seen.node.incarnation,
            devices=((GPU, Mib(gpu_mb)),) if gpu_mb else (),
            shareable=shareable,
            rank=rank,
            world_size=world_size,
            barrier=world_size > 1,
            memory_mb=Mib(memory_mb),
            shares=shares,
        )
        payload = RunPayload(
            spec=RunSpec(**{key: value for key, value in given.items() if key != "arguments"}),
            arguments=given.get("arguments", json.dumps({"args": args}).encode()),
            resume_state=resume_state,
            resume_uri=None,
            attempt=fence,
            name="a test",
            tenant="default",
            timeout_seconds=None,
        )
        await self.executor.send([order], {order.task: payload})
        return Run(self, order)

    async def send(self, *orders: Order) -> None:
        await self.executor.send(orders, {})

    async def until(self, found: Callable[[], Any]) -> Any:
        """What `found` says as soon as it is true; looked at again whenever reports come in."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (answer := found()):
                self._news.clear()
                await self._news.wait()
        return answer

    async def _listen(self) -> None:
        while True:
            for report in await self.executor.reports():
                match report:
                    case NodeReport() | NodeLost():
                        self.nodes.append(report)
                    case Heartbeat():
                        self.beats.append(asyncio.get_running_loop().time())
                    case Sampled():
                        self.samples.append(report)
                    case NodesListed():
                        pass
                    case NodeSample():
                        self.node_samples.append(report)
                    case _:
                        claim: Any = report  # what is left is about one run
                        self.heard.setdefault((claim.task, claim.fence, claim.rank), []).append(claim)
            self._news.set()
