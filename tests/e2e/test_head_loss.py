"""The head of a joined Ray stands still: said long before Ray ends its nodes, and over when it goes on."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gpubroker_server.adapters.ray.head.head import HeadState, running_head, stop_head

from tests.e2e.lab.conftest import a_home
from tests.e2e.ray_lab import guest_environment, lab_options, vital_pid
from tests.e2e.service_process import ServiceProcess, until

RAY_GIVES_UP_SECONDS = 60.0


@pytest.fixture
def head() -> Iterator[tuple[HeadState, Path]]:
    with a_home() as home:
        try:
            yield asyncio.run(running_head(lab_options(home))), home
        finally:
            asyncio.run(stop_head(home))


def executor_of(service: ServiceProcess) -> tuple[int, str]:
    answer = httpx.get(f"{service.url}/readyz")
    return answer.status_code, answer.json()["parts"]["executor"]


def test_a_head_that_does_not_answer_is_said_at_once_and_runs_go_on(
    tmp_path: Path, head: tuple[HeadState, Path]
) -> None:
    state, home = head
    joined = {"address": state.address, "cluster": "joined", "spares": 1, "warm_runners": 0}
    with ServiceProcess(tmp_path / "data", guest_environment(home), ray=joined) as service:
        broker, flag = service.broker, tmp_path / "flag"
        run = broker.submit("tests.e2e.work:hold", str(tmp_path / "witness"), str(flag))
        until(lambda: broker.get(run).state == "running", "it runs")
        control = vital_pid(state, "gcs_server")
        assert control is not None
        os.kill(control, signal.SIGSTOP)
        stopped_at = time.monotonic()
        try:
            until(lambda: executor_of(service) == (503, "no-head"), "it is said")
            seconds = time.monotonic() - stopped_at
            print(f"the loss of the head was said after {seconds:.1f} s")
            assert seconds < RAY_GIVES_UP_SECONDS / 3
            assert "does not answer" in broker.stats().executor["message"]
            flag.touch()
            assert broker.result(run) == 1, "agents are talked to without the head"
        finally:
            os.kill(control, signal.SIGCONT)
        until(lambda: executor_of(service) == (200, "ok"), "it is over")
        assert broker.result(broker.submit("tests.e2e.work:add", 1, 2)) == 3
