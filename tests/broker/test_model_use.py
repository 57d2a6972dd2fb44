"""While something waits for a model's memory, the leader makes a cycle only if it is another's turn."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest
from gpubroker_server.broker import background
from gpubroker_server.broker.background import watch_model_use
from gpubroker_server.core.domain.model_orders import ModelsInUse
from gpubroker_server.core.domain.models import turn_seconds
from gpubroker_server.core.domain.orders import Report
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.lifecycle.model_turns import turns
from gpubroker_server.core.world.world import World

from tests.broker.stage import Hands
from tests.builders import commit, submit
from tests.core.served import LLM, POLICY, a_model, at, loaded, the

LOOKS = 20


class Gateways:
    """Asked `LOOKS` times which models are in use; what the leader does with that, it does at once."""

    def __init__(self, world: World, in_use: frozenset[str]) -> None:
        self.world = world
        self.in_use: ModelsInUse | None = ModelsInUse(in_use)
        self.clock = Hands()
        self.cycles = 0
        self._reads = 0

    async def read(self) -> ModelsInUse | None:
        self._reads += 1
        if self._reads > LOOKS:
            raise asyncio.CancelledError
        return self.in_use

    def hear(self, _reports: Sequence[Report]) -> None:
        self.cycles += 1
        assert self.in_use is not None
        now = self.clock.now()
        commit(self.world, turns(self.world, self.in_use, now, POLICY), now)

    async def ask(self, seconds: float) -> int:
        """The cycles that they cause then."""
        self.clock.time, self.cycles, self._reads = at(seconds), 0, 0
        with suppress(asyncio.CancelledError):
            await watch_model_use(self.world, self.read, self.clock, POLICY, self.hear)
        return self.cycles


async def test_a_cycle_is_made_only_when_a_turn_begins_or_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "USE_SECONDS", 0.0)
    world = loaded()
    submit(world, a_model("other"))
    gateways = Gateways(world, frozenset({LLM}))
    turn = turn_seconds(Seconds(1.0))
    assert await gateways.ask(3.0) == 0
    assert await gateways.ask(turn + 1.0) == 1
    assert the(world).priority == 49
    gateways.in_use = None
    assert await gateways.ask(turn + 2.0) == 0, "the database does not answer"
