"""A gateway whose models are in the ledger, and whose leader is told by a test what to do next."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from gpubroker_server.core.domain.decisions import Request
from gpubroker_server.core.domain.model_orders import IndexedModel, ModelState, ServerIndex
from gpubroker_server.core.domain.models import ModelKey, ModelRules
from gpubroker_server.core.domain.server_rules import ServerRules
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Mib, Seconds
from gpubroker_server.core.world.events import Event
from gpubroker_server.inference.lanes import LaneOptions, Lanes
from gpubroker_server.inference.server_choice import Residencies
from msgspec.structs import replace

from tests.builders import GIB, a_sample
from tests.gateway.harness import Gateway, until
from tests.gateway.inference_stage import Handler, Stage, a_stage
from tests.simulated_host import SimulatedHost, SimulatedModel

RULES = ServerRules("main", "n1", models={"any": ModelRules(Mib(50 * GIB))})


@asynccontextmanager
async def resident_models(
    heard: Handler,
    *models: SimulatedModel,
    slots: int | None = None,
    most_waiting_bytes: int = 10**9,
    **rules: Any,
) -> AsyncIterator["ResidentModels"]:
    host = SimulatedHost("main", models or (SimulatedModel("any"),))
    lanes = Lanes(LaneOptions(slots={} if slots is None else {b"any": slots}))
    async with a_stage(
        heard, served=(replace(RULES, **rules), host), lanes=lanes, most_waiting_bytes=most_waiting_bytes
    ) as stage:
        yield ResidentModels(stage, host, lanes)


class ResidentModels:
    def __init__(self, stage: Stage, host: SimulatedHost, lanes: Lanes) -> None:
        self.stage = stage
        self.host = host
        self.lanes = lanes
        self.gateway = stage.gateway

    @property
    def residencies(self) -> Residencies:
        """The gateway's, which these tests have."""
        assert self.gateway.residencies is not None
        return self.gateway.residencies

    def of(self, model: str = "any") -> Task | None:
        return self.gateway.world.models.of(ModelKey("main", model))

    async def wanted(self, model: str = "any") -> Task:
        await until(lambda: self.of(model) is not None)
        task = self.of(model)
        assert task is not None
        return task

    async def index(self, **stages: ModelState) -> None:
        """The server has these models and no others, and the leader has read so."""
        self.host.restart()
        for name in stages:
            await self.host.load(name, (), Seconds(1.0))
        now = self.gateway.clock.now()
        models = {name: IndexedModel(name, stage) for name, stage in stages.items()}
        await self.gateway.hear(ServerIndex("main", now, models))

    async def load(self, model: str = "any") -> Task:
        """Its device is measured before, so that what has left is known to be gone."""
        task = await self.wanted(model)
        self.gateway.clock.advance(0.1)
        self.gateway.world.measure([a_sample("gpu0", self.gateway.clock.now())])
        await self.gateway.plan(task.id)
        await self.index(**{model: ModelState.READY})
        return self.gateway.task(task.id)

    async def unload(self, model: str = "any") -> None:
        """Notice is given; the index says what becomes of it."""
        gateway, task = self.gateway, await self.wanted(model)
        now = gateway.clock.now()
        await gateway.store.request(Request(f"unload-{task.id}", task.id, task.tenant, "cancel", {}, now))
        await gateway.turn()


def doubts_told(gateway: Gateway) -> list[str]:
    """Of which models the leader is told from now on that they do not answer."""
    told: list[str] = []

    def on_events(events: Sequence[Event]) -> None:
        made = (gateway.world.requests.get(event.key) for event in events if event.kind == "request.made")
        told.extend(request.task for request in made if request and request.fields.get("doubted"))

    gateway.store.listen(on_events)
    return told
