"""Tenants at one model, in simulated time: the tenant that sends much does not make the other one wait."""

import heapq
from statistics import median

import pytest
from gpubroker_server.core.domain.units import MonotonicSeconds
from gpubroker_server.core.serving.lane import LaneRules, ModelLane, Place, Queued

ANSWER_SECONDS = 0.02


def median_seconds(
    clients: dict[str, int], works_on: int, slots: int | None, answers: int = 6000
) -> dict[str, float]:
    """By tenant, from request to answer, in the second half of so many answers: each client sends its next
    request when it has its answer. The model works on so many at once, in the order in which they came."""
    lane, now = ModelLane(LaneRules(), slots), MonotonicSeconds(0.0)
    asked_at: dict[Place, float] = {}
    free_at = [0.0] * works_on
    ends: list[tuple[float, int, str, float, float]] = []
    told: dict[str, list[float]] = {tenant: [] for tenant in clients}
    number = 0

    def send(tenant: str, asked: float) -> None:
        """To the model, which begins when it has answered what came before."""
        nonlocal number
        number += 1
        end = max(now, heapq.heappop(free_at)) + ANSWER_SECONDS
        heapq.heappush(free_at, end)
        heapq.heappush(ends, (end, number, tenant, asked, now))

    def ask(tenant: str) -> None:
        if lane.try_start(tenant):
            send(tenant, now)
            return
        queued = lane.enqueue(tenant, 50, now)
        assert isinstance(queued, Queued)
        asked_at[queued.place] = now

    for tenant, count in clients.items():
        for _ in range(count):
            ask(tenant)
    for answered in range(answers):
        end, _, tenant, asked, started = heapq.heappop(ends)
        now = MonotonicSeconds(end)
        lane.finish(tenant, now - started, now)
        if answered > answers // 2:
            told[tenant].append(now - asked)
        while (place := lane.start_next(now)) is not None:
            send(place.tenant, asked_at.pop(place))
        ask(tenant)
    return {tenant: median(seconds) for tenant, seconds in told.items()}


@pytest.mark.parametrize("works_on", [1, 4, 16])
@pytest.mark.parametrize("is_learned", [False, True])
def test_few_clients_of_one_tenant_wait_less_than_many_of_another(works_on: int, is_learned: bool) -> None:
    found = median_seconds({"many": 64, "few": 4}, works_on, None if is_learned else works_on)
    assert found["few"] < found["many"] / 3, found


@pytest.mark.parametrize("slots", [None, 4])
def test_tenants_with_as_many_clients_wait_as_long(slots: int | None) -> None:
    found = median_seconds({"a": 20, "b": 20, "c": 20}, 4, slots)
    assert max(found.values()) < 1.2 * min(found.values()), found
