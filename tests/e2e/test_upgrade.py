"""A service is upgraded in place while its runs are at work: they go on, and so does their agent at first."""

from pathlib import Path
from typing import Any

import pytest
from gpubroker import Broker
from gpubroker.wire.nodes import NodeAgent
from gpubroker_server.adapters.ray import wire

from tests.e2e.hands import Hands
from tests.e2e.next_release import Installation
from tests.e2e.released import THIS_TREE, unpacked
from tests.e2e.service_process import GIB, ServiceProcess, until


def agent_of(broker: Broker) -> NodeAgent:
    """Wait for the one agent that is known: while an agent is replaced, there is none."""
    agents: list[NodeAgent] = []

    def is_known() -> bool:
        agents[:] = [node.agent for node in broker.nodes() if node.agent]
        return bool(agents)

    until(is_known, "its agent is known")
    [agent] = agents
    return agent


@pytest.mark.provokes("agent-outdated")
def test_runs_go_on_during_an_upgrade_and_new_ones_start_beside_them(tmp_path: Path) -> None:
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
        assert agent_of(broker).protocol == wire.PROTOCOL
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
        assert agent_of(broker).outdated, "it is used as it is"
        assert "stays in use" in str(agent_of(broker).message)
        assert "agent-outdated" in {one.kind for one in broker.diagnostics()}
        beside = [broker.submit("tests.e2e.work:add", n, n, gpu_mb=GIB) for n in (1, 2)]
        assert [broker.result(task) for task in beside] == [2, 4]
        until(lambda: sum(gpu.leased_mb for gpu in broker.gpus()) == 10 * GIB, "one run has memory")
        assert [task.attempt for task in hands.end(held, small)] == [1, 1]
        witness = (tmp_path / "witness").read_text(encoding="utf-8").splitlines()
        assert sorted(witness) == sorted(f"{task.id} 1" for task in (held, small, ended))

        until(lambda: not agent_of(broker).outdated, "its agent is of the next release")
        assert agent_of(broker).protocol == wire.PROTOCOL + 1
        assert broker.result(broker.submit("tests.e2e.work:add", 20, 22, gpu_mb=20 * GIB)) == 42
        until(lambda: all(gpu.leased_mb == 0 for gpu in broker.gpus()), "all memory is free again")


SAVES_AND_EXITS_0 = """
trap 'echo saved >> "$0"; exit 0' TERM
echo began >> "$0"
while [ ! -e "$0.enough" ]; do sleep 0.05; done
"""


def test_last_releases_commands_exiting_0_under_notice_have_not_succeeded(tmp_path: Path) -> None:
    """Their agent and their processes call it success, and go on after the upgrade."""
    released = unpacked(tmp_path / "released")
    service = ServiceProcess(tmp_path / "data", env={"PYTHONPATH": released})
    witnesses = [tmp_path / name for name in ("cancelled", "preempted", "finished")]
    with service:
        broker = service.broker
        options: dict[str, Any] = {"gpu_mb": 7 * GIB, "priority": "background"}
        tasks = [
            broker.submit(["/bin/sh", "-c", SAVES_AND_EXITS_0, str(witness)], **options)
            for witness in witnesses
        ]
        until(lambda: all(map(Path.exists, witnesses)), "the commands are at work")
        assert service.terminate() == 0

        service.use(THIS_TREE)
        service.start()
        broker = service.broker
        assert agent_of(broker).protocol == wire.SPOKEN[0], "it is used as it is"
        cancelled, preempted, finished = tasks
        Path(f"{witnesses[2]}.enough").touch()
        assert broker.wait(finished).state == "succeeded", "without a notice exit code 0 is success"
        broker.cancel(cancelled)
        assert broker.wait(cancelled).state == "cancelled"
        urgent = broker.submit("tests.e2e.work:add", 20, 22, gpus=2, priority="critical")
        assert broker.result(urgent) == 42
        Path(f"{witnesses[1]}.enough").touch()
        again = broker.wait(preempted)
        assert (again.state, again.attempt) == ("succeeded", 2)
        assert witnesses[1].read_text().splitlines() == ["began", "saved", "began"]
