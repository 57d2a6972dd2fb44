"""Storms of faults over several brokers: nothing is lost or done twice, and a planted fault is seen."""

import asyncio
from collections import Counter
from contextlib import suppress

import pytest
from gpubroker_server.broker.leadership import LeaderCandidate
from gpubroker_server.core.domain.leader_term import LeaderTerm

from tests.simulation.storm import storm

STEPS = 100
"""Long runs take 200: `python -m tests.chaos simulation`."""


def test_whatever_breaks_nothing_is_lost_or_done_twice() -> None:
    reports = [storm(seed, STEPS) for seed in range(1, 6)]
    assert [report.wrong for report in reports if report.wrong] == []
    struck = sum((report.faults for report in reports), Counter[str]())
    assert len(struck) >= 12
    assert sum(report.acknowledged for report in reports) > 80


def test_the_same_seed_is_the_same_storm() -> None:
    assert storm(11, 40) == storm(11, 40)


def test_a_process_that_goes_on_after_its_stop_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    lead = LeaderCandidate._lead

    async def goes_on(self: LeaderCandidate, leader_term: LeaderTerm) -> None:
        with suppress(asyncio.CancelledError):
            await lead(self, leader_term)

    monkeypatch.setattr(LeaderCandidate, "_lead", goes_on)
    assert any(storm(seed, 60, ["clean stop"]).wrong for seed in range(1, 4))
