"""Loads of all tokens overlap: one that began before a token was revoked may end after it."""

import asyncio
from collections.abc import Sequence

from gpubroker_server.core.domain.units import Instant
from gpubroker_server.http.identity import Tokens, new_token
from gpubroker_server.ports.store import TokenRow

from tests.gateway.harness import ManualClock, until
from tests.stores import SqliteStore


class SlowReads(SqliteStore):
    """Rows are as they were when they were asked for; each answer comes when it is let go."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.held: list[asyncio.Event] | None = None

    async def tokens(self) -> Sequence[TokenRow]:
        rows = await super().tokens()
        if self.held is not None:
            self.held.append(go_on := asyncio.Event())
            await go_on.wait()
        return rows


async def a_known_token() -> tuple[SlowReads, Tokens, str]:
    store = SlowReads(clock := ManualClock())
    tokens = Tokens(store, clock)
    secret, row = new_token("guest", tenant="default", scopes=["*"], max_priority=50, now=clock.now())
    await store.put_token(row, by="test")
    await tokens.load()
    assert tokens.identify(secret) is not None
    store.held = []
    return store, tokens, secret


async def loads_around_a_revocation(
    store: SlowReads, tokens: Tokens
) -> tuple["asyncio.Task[None]", "asyncio.Task[None]"]:
    """One has read the rows before it and one after it; neither has its answer."""
    early = asyncio.create_task(tokens.load())
    await until(lambda: len(store.held or ()) == 1)
    await store.drop_token("guest", by="test")
    late = asyncio.create_task(tokens.load())
    await until(lambda: len(store.held or ()) == 2)
    return early, late


async def test_a_load_that_began_earlier_does_not_bring_back_a_revoked_token() -> None:
    store, tokens, secret = await a_known_token()
    assert store.held is not None
    early, late = await loads_around_a_revocation(store, tokens)
    store.held[1].set()
    await late
    assert tokens.identify(secret) is None
    store.held[0].set()
    await early
    assert tokens.identify(secret) is None


async def test_loads_that_end_in_their_order_all_count() -> None:
    store, tokens, secret = await a_known_token()
    assert store.held is not None
    early, late = await loads_around_a_revocation(store, tokens)
    store.held[0].set()
    await early
    assert tokens.identify(secret) is not None
    store.held[1].set()
    await late
    assert tokens.identify(secret) is None


async def test_token_dropped_by_this_process_stays_dropped_and_others_stay_known() -> None:
    """A load that began before reads once more."""
    store, tokens, secret = await a_known_token()
    assert store.held is not None
    early = asyncio.create_task(tokens.load())
    await until(lambda: len(store.held or ()) == 1)
    await store.drop_token("guest", by="test")
    tokens.drop("guest")
    assert tokens.identify(secret) is None
    other, row = new_token("other", tenant="default", scopes=["*"], max_priority=50, now=Instant(0.0))
    await store.put_token(row, by="test")
    store.held[0].set()
    await until(lambda: len(store.held or ()) == 2)
    assert tokens.identify(secret) is None
    store.held[1].set()
    await early
    assert tokens.identify(secret) is None
    assert tokens.identify(other) is not None
