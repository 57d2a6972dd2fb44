"""Expected starts, and how accurate such forecasts were."""

import pytest
from gpubroker_server.core.domain.estimates import What
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.planning.forecasts.forecast_rounds import accuracy_topic
from gpubroker_server.core.planning.forecasts.forecasts import make_forecasts
from gpubroker_server.core.planning.forecasts.reservations import Basis

from tests.builders import GIB, a_pledge, a_sketch
from tests.gateway.harness import Client, Gateway

WHOLE = {"gpu_mb": 80 * GIB}


async def test_a_waiting_task_shows_its_expected_start_and_the_basis(gateway: Gateway, api: Client) -> None:
    running = await api.submit(resources=WHOLE, expected_seconds=600)
    await gateway.admit(running)
    waiting = await api.submit(resources=WHOLE)
    *_, gateway.forecast_starts = make_forecasts(gateway.world, gateway.policy, gateway.clock.now())
    start = (await api.get(f"/tasks/{waiting}")).json()["pending"]["start"]
    assert (start["basis"], start["n"]) == ("stated", 0)
    assert start["p50_seconds"] == start["p90_seconds"] == 600.0
    assert start["p50_at"].endswith("Z")
    again = (await api.get(f"/tasks/{waiting}")).json()["pending"]["start"]
    assert again == start
    gateway.forecast_starts = []
    assert (await api.get(f"/tasks/{waiting}")).json()["pending"]["start"] is None


async def test_a_task_with_a_pledge_starts_when_the_room_has_arrived(gateway: Gateway, api: Client) -> None:
    waiting = TaskId(await api.submit(resources=WHOLE))
    row = gateway.world.tasks[waiting]
    gateway.world.add_pledge(a_pledge(row, next(iter(gateway.world.ledgers)), 80 * GIB))
    start = (await api.get(f"/tasks/{waiting}")).json()["pending"]["start"]
    assert (start["basis"], start["p50_seconds"]) == ("stated", 30.0)


async def test_an_expected_start_shows_the_accuracy_of_earlier_forecasts(
    gateway: Gateway, api: Client
) -> None:
    await gateway.admit(await api.submit(resources=WHOLE, expected_seconds=600))
    waiting = await api.submit(resources=WHOLE)
    assert (await api.get(f"/tasks/{waiting}/explain")).json()["start_record"] is None
    for basis in (Basis.STATED, Basis.GUESS):
        gateway.world.learned.put(accuracy_topic(basis, What.START_ERROR), a_sketch([10.0, 10.0, 90.0]))
        gateway.world.learned.put(accuracy_topic(basis, What.START_SHARE), a_sketch([0.5, 0.5, 2.0]))
    explained = (await api.get(f"/tasks/{waiting}/explain")).json()
    assert (explained["start"]["basis"], explained["start_record"]["basis"]) == ("stated", "stated")
    assert explained["start_record"]["median_error_seconds"] == pytest.approx(10, rel=0.03)


async def test_the_totals_show_the_accuracy_of_forecasts(gateway: Gateway, api: Client) -> None:
    assert (await api.get("/stats")).json()["forecasts"] == []
    errors, shares = a_sketch([10.0, 10.0, 90.0]), a_sketch([0.5, 0.5, 2.0])
    gateway.world.learned.put(accuracy_topic(Basis.LEARNED, What.START_ERROR), errors)
    gateway.world.learned.put(accuracy_topic(Basis.LEARNED, What.START_SHARE), shares)
    [told] = (await api.get("/stats")).json()["forecasts"]
    assert (told["basis"], told["n"], told["within_p90"]) == ("learned", 3, 0.667)
    assert abs(told["median_error_seconds"] - 10) < 0.3
    metrics = (await api.get("/metrics")).text
    assert f'gpubroker_forecast_within_p90_ratio{{basis="learned"}} {1 - 1 / 3}' in metrics
    assert 'gpubroker_forecast_error_seconds{basis="learned"} ' in metrics
    assert 'basis="stated"' not in metrics
