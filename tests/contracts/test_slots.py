"""Gateways on one PostgreSQL divide a model's slots, as the leader tells them, and never use one twice."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from gpubroker_server.adapters.sql.store import SqlStore
from gpubroker_server.broker.background import SlotDivider
from gpubroker_server.core.domain.units import Instant, Term
from gpubroker_server.core.serving.slots import FRESH_SECONDS, HOLD_SECONDS, Claim
from gpubroker_server.http.identity import Identity
from gpubroker_server.inference.lanes import NO_WISH, LaneEntry, LaneOptions, Lanes
from gpubroker_server.inference.slot_leases import SlotLeases
from gpubroker_server.ports.last_values import LastValues, LeaderSeen, SlotStore
from gpubroker_server.ports.store import StoreUnavailable

from tests.builders import NOW
from tests.contracts.scenes import opened

SOMEBODY = Identity("me", "default", ("*",), 50)


class ManualClock:
    at = NOW

    def now(self) -> Instant:
        return self.at


class Away(SlotStore):
    """A database that cannot be reached."""

    async def claim_slots(self, claim: Claim) -> None:
        raise StoreUnavailable("gone")

    async def slot_claims(self) -> Sequence[Claim]:
        raise StoreUnavailable("gone")

    async def drop_slots(self, gateway: str) -> None:
        raise StoreUnavailable("gone")


class Scene:
    def __init__(self, store: SqlStore) -> None:
        self.clock = ManualClock()
        self.store = store
        self.divider = SlotDivider({"m": 8}, store, self.clock)
        self.lanes = {name: self.new_lanes() for name in ("a", "b")}
        self.leases = {name: self._leases(name, store) for name in self.lanes}
        self.word: LeaderSeen | None = None

    def new_lanes(self) -> Lanes:
        return Lanes(LaneOptions(slots={b"m": 8}), now=lambda: self.clock.at)

    def _leases(self, name: str, store: SlotStore) -> SlotLeases:
        return SlotLeases(name, {"m": 8}, self.lanes[name], store, self.clock, lambda: self.word)

    def ask(self, name: str, count: int) -> list[LaneEntry]:
        return [self.lanes[name].enter(b"m", SOMEBODY, NO_WISH) for _ in range(count)]

    async def rounds(self, count: int, term: int = 1, unknown: int = 0) -> None:
        """Leader and gateways act once each, second by second. `unknown`: gateways that the leader does not
        know yet, or any more, each of which uses one slot."""
        for _ in range(count):
            await self.divider.divide(Term(term))
            self.word = LeaderSeen(Term(term), "one:1", self.clock.now(), {}, slots=self.divider.divided)
            for leases in self.leases.values():
                await leases.renew()
                assert sum(self.slots()) <= 8 + unknown
            self.clock.at = Instant(self.clock.at + 1)

    def slots(self) -> list[int]:
        return [lanes.load("m").slots for lanes in self.lanes.values()]


@asynccontextmanager
async def a_scene(url: str) -> AsyncIterator[Scene]:
    async with opened(url) as store:
        yield Scene(store)


async def test_slots_go_where_requests_are_and_come_back(postgres_url: str) -> None:
    async with a_scene(postgres_url) as scene:
        assert scene.slots() == [1, 1]
        await scene.rounds(10)
        assert scene.slots() == [4, 4]
        entries = scene.ask("a", 20)
        await scene.rounds(12)
        assert scene.slots() == [7, 1]
        assert scene.lanes["a"].load("m").in_flight == 7
        more = scene.ask("b", 20)
        await scene.rounds(12)
        assert scene.slots() == [4, 1], "what is under way counts until it is answered"
        for entry in entries:
            entry.leave()
        await scene.rounds(12)
        assert scene.slots() == [1, 7]
        for entry in more:
            entry.leave()


async def test_the_next_leader_counts_what_gateways_hold(postgres_url: str) -> None:
    async with a_scene(postgres_url) as scene:
        await scene.rounds(10)
        said = LastValues(leader=LeaderSeen(Term(2), "two:1", scene.clock.now(), {}, slots={}))
        await scene.store.publish(Term(2), 1, said)
        assert (await scene.store.published(0))[1] == said
        scene.ask("a", 20)
        await scene.rounds(2, term=2)
        assert scene.slots() == [4, 1]
        await scene.rounds(12, term=2)
        assert scene.slots() == [7, 1]
        await scene.divider.divide(None)
        assert scene.divider.divided == {}, "which gives nobody anything, and takes nothing"


async def test_ending_gateway_frees_its_slots_at_once_and_a_killed_one_later(
    postgres_url: str,
) -> None:
    async with a_scene(postgres_url) as scene:
        await scene.rounds(10)
        await scene.leases.pop("b").drop()
        del scene.lanes["b"]
        await scene.rounds(8)
        assert scene.slots() == [8]
        scene.lanes["b"] = scene.new_lanes()
        scene.leases["b"] = scene._leases("b", scene.store)
        del scene.leases["a"]
        await scene.rounds(8, unknown=1)
        assert scene.slots() == [8, 1], "nobody knows that it is gone"
        del scene.lanes["a"]
        await scene.rounds(int(HOLD_SECONDS))
        assert scene.slots() == [8]
        assert [claim.gateway for claim in await scene.store.slot_claims()] == ["b"]


async def test_cut_off_gateway_is_down_to_one_slot_before_its_slots_are_given(
    postgres_url: str,
) -> None:
    async with a_scene(postgres_url) as scene:
        await scene.rounds(10)
        scene.leases["a"]._store = Away()
        await scene.rounds(int(HOLD_SECONDS - FRESH_SECONDS) - 2)
        assert scene.slots() == [4, 4]
        await scene.rounds(8, unknown=1)
        assert scene.slots() == [1, 8]
        scene.leases["a"]._store = scene.store
        scene.ask("a", 20)
        await scene.rounds(16, unknown=1)
        assert scene.slots() == [7, 1]


async def test_gateway_that_wakes_after_its_share_ended_uses_one_slot(
    postgres_url: str,
) -> None:
    """It does so before it hears of anything."""
    async with a_scene(postgres_url) as scene:
        entries = scene.ask("a", 20)
        await scene.rounds(24)
        lanes, asleep = scene.lanes["a"], scene.leases.pop("a")
        assert lanes.load("m").in_flight == 7
        await scene.rounds(int(HOLD_SECONDS) + 2, unknown=1)
        assert scene.slots() == [1, 8], "what was its own is the other one's"
        for entry in entries[:7]:
            entry.leave()
        assert lanes.load("m").in_flight == 1, "of those that waited"
        assert lanes.enter(b"m", SOMEBODY, NO_WISH).waits
        for entry in entries:
            entry.leave()
        scene.leases["a"] = asleep
        scene.ask("a", 20)
        await scene.rounds(16, unknown=1)
        assert scene.slots() == [7, 1]


async def test_a_leader_that_divides_none_leaves_all_to_each(postgres_url: str) -> None:
    async with a_scene(postgres_url) as scene:
        divides_none = SlotDivider({}, scene.store, scene.clock)
        scene.word = LeaderSeen(Term(1), "one:1", scene.clock.now(), {}, slots=divides_none.divided)
        await scene.leases["a"].renew()
        assert scene.slots() == [8, 1]


async def test_a_claim_that_arrives_late_takes_no_newer_ones_place(postgres_url: str) -> None:
    async with opened(postgres_url) as store:
        newer = Claim("a", Instant(NOW + 0.001), {"m": 5}, {"m": 1})
        await store.claim_slots(newer)
        await store.claim_slots(Claim("a", NOW, {"m": 2}, {"m": 1}))
        assert await store.slot_claims() == [newer]
        same_moment = newer._replace(holds={"m": 6})
        await store.claim_slots(same_moment)
        assert await store.slot_claims() == [same_moment]
