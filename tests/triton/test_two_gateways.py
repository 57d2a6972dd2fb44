"""Two gateways on one PostgreSQL in front of one Triton, of which either may have requests under way.

The short form is `tests/contracts/test_letting_go.py`: a leader waits ten seconds first
where others may lead.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chaos.forked import ForkedGateway, ForkedService
from tests.e2e.service_process import ServiceProcess, until
from tests.triton.server import Triton
from tests.triton.test_residency import infer, ready, settings


def in_flight(gateway: ServiceProcess, model: str) -> bool:
    metrics = httpx.get(f"{gateway.url}/metrics", headers={"Authorization": f"Bearer {gateway.token}"}).text
    return f'gpubroker_model_requests_in_flight{{model="{model}"}} 1.0' in metrics


@pytest.mark.evidence
def test_a_model_is_not_unloaded_before_both_gateways_have_their_answers(
    postgres_url: str, tmp_path: Path
) -> None:
    shared = {"database_url": postgres_url, "blob_dir": str(tmp_path / "blobs"), "drain_seconds": 2.0}
    with Triton(tmp_path / "triton") as triton:
        chosen: dict[str, Any] = {**settings(triton, "simulated"), **shared}
        one, other = ForkedService(tmp_path / "one", **chosen), ForkedGateway(tmp_path / "other", **chosen)
        with one, other, ThreadPoolExecutor() as asking:
            assert infer(one, "slow") == [1, 2, 3]
            until(lambda: other.broker.model("slow").state == "resident", "the other one knows of it")
            late = asking.submit(infer, other, "slow", sleep_ms=1500)
            until(lambda: in_flight(other, "slow"), "it is asked")
            one.broker.unload_model("slow")
            until(lambda: other.broker.model("slow").state != "resident", "the other one has heard of it")
            assert not late.done()
            assert ready(triton) == ["slow"], "it is not asked to leave before it has answered"
            assert late.result() == [1, 2, 3]
            until(lambda: ready(triton) == [], "then it leaves")


@pytest.mark.evidence
def test_two_gateways_together_ask_a_model_no_more_at_once_than_its_slots(
    postgres_url: str, tmp_path: Path
) -> None:
    """The short form is `tests/contracts/test_slots.py`: a leader gives nothing for its first six seconds."""
    shared = {"database_url": postgres_url, "blob_dir": str(tmp_path / "blobs"), "drain_seconds": 2.0}
    with Triton(tmp_path / "triton", loaded=("slow",)) as triton:
        server = {"name": "main", "http_url": triton.url}
        chosen: dict[str, Any] = {
            "engine": "simulated",
            "triton": {"servers": [server], "slots": {"slow": 6}},
            **shared,
        }
        one, other = ForkedService(tmp_path / "one", **chosen), ForkedGateway(tmp_path / "other", **chosen)
        with one, other, ThreadPoolExecutor(32) as asking:
            asked = [asking.submit(infer, to, "slow", sleep_ms=60) for _ in range(120) for to in (one, other)]
            until(lambda: slots(one, other) == [3, 3], "both have their half")
            assert {tuple(answer.result()) for answer in asked} == {(1, 2, 3)}


def slots(*gateways: ServiceProcess) -> list[int]:
    """Never above six, all together."""
    each = [figure(gateway, "model_slots", "slow") for gateway in gateways]
    assert sum(each) <= 6
    return each


def figure(gateway: ServiceProcess, name: str, model: str) -> int:
    metrics = httpx.get(f"{gateway.url}/metrics", headers={"Authorization": f"Bearer {gateway.token}"}).text
    begin = f'gpubroker_{name}{{model="{model}"}} '
    return sum(
        int(float(line.removeprefix(begin))) for line in metrics.splitlines() if line.startswith(begin)
    )
