"""A service is upgraded in place while its runs are at work: they go on, and so does their agent at first."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from gpubroker import Broker
from gpubroker_server.adapters.ray import wire

from tests.e2e.hands import Hands
from tests.e2e.next_release import Installation
from tests.e2e.service_process import GIB, ServiceProcess, until


def agent_of(broker: Broker) -> Mapping[str, Any]:
    until(lambda: bool(broker.nodes().items), "its node is known")
    [node] = broker.nodes().items
    return node.agent or {}


@pytest.mark.provokes("agent-outdated")
def test_runs_go_on_while_the_service_is_upgraded_and_new_ones_start_beside_them(tmp_path: Path) -> None:
    installed = Installation(tmp_path)
    service = ServiceProcess(
        tmp_path / "data",
        env=installed.env,
        cwd=tmp_path,
        task_path=installed.task_path,
        ray={"spares": 1, "warm_runners": 1},
        policy={"sample_period_seconds": 0.5, "beat_seconds": 0.5},
    )
    with service:
        broker = service.broker
        assert agent_of(broker)["protocol"] == wire.PROTOCOL
        hands = Hands(broker, tmp_path)
        held = hands.at_work("held", gpu_mb=10 * GIB)
        small = hands.at_work("small", cpu=0.1)
        ended = hands.at_work("ended", gpu_mb=8 * GIB)
        assert service.terminate() == 0

        installed.upgrade()
        hands.let_go(ended)
        service.start()

        hands.broker = broker = service.broker
        assert broker.result(ended) == 1
        assert agent_of(broker)["outdated"], "it is used as it is"
        assert "stays in use" in agent_of(broker)["message"]
        assert "agent-outdated" in {one.kind for one in broker.diagnostics()}
        beside = [broker.submit("tests.e2e.work:add", n, n, gpu_mb=GIB) for n in (1, 2)]
        assert [broker.result(task) for task in beside] == [2, 4]
        until(lambda: sum(gpu.leased_mb for gpu in broker.gpus()) == 10 * GIB, "one run has memory")
        assert [task.attempt for task in hands.end(held, small)] == [1, 1]
        witness = (tmp_path / "witness").read_text(encoding="utf-8").splitlines()
        assert sorted(witness) == sorted(f"{task.id} 1" for task in (held, small, ended))

        until(lambda: not agent_of(broker).get("outdated", True), "its agent is of the next release")
        assert agent_of(broker)["protocol"] == wire.PROTOCOL + 1
        assert broker.result(broker.submit("tests.e2e.work:add", 20, 22, gpu_mb=20 * GIB)) == 42
        until(lambda: all(gpu.leased_mb == 0 for gpu in broker.gpus()), "all memory is free again")
