"""A leader that cannot settle what it heard asks for nothing more."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from gpubroker_server.broker import inbox
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.orders import Sampled
from gpubroker_server.core.domain.units import Term
from gpubroker_server.ports.store import CommitVerdict

from tests.broker.stage import ForgetfulStore, Hands, a_stage
from tests.patience import PATIENCE_SECONDS


class WatchedStore(ForgetfulStore):
    """Tells when somebody wanted to commit and could not."""

    def __init__(self) -> None:
        super().__init__(Hands())
        self.missed = asyncio.Event()

    async def commit(self, term: Term, decisions: Sequence[Decision]) -> Sequence[CommitVerdict]:
        if self.away:
            self.missed.set()
        return await super().commit(term, decisions)


async def test_reports_wait_at_the_executor_while_too_many_are_in_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "MAX_REPORTS", 0)
    store = WatchedStore()
    async with a_stage(tmp_path, store) as stage:
        await stage.submit("one", seconds=600)
        await stage.leader.take_over()
        store.away = True
        leading = asyncio.create_task(stage.leader.run())
        await store.missed.wait()
        stage.executor.sample()
        waiting = await asyncio.wait_for(stage.executor.reports(), PATIENCE_SECONDS)
        assert any(isinstance(report, Sampled) for report in waiting)
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)
