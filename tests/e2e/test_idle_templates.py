"""Idle templates: they fill what is idle, give way, and end with their token or by hand."""

from pathlib import Path
from typing import Any

from gpubroker import Broker, Submission

from tests.chaos.forked import ForkedService
from tests.e2e.service_process import GIB, ServiceProcess, until
from tests.patience import PATIENCE_SECONDS

QUICK = {"idle_check_seconds": 0.2, "idle_grace_seconds": 0.4}


def test_a_template_fills_an_idle_gpu_gives_way_and_stops_with_its_token(tmp_path: Path) -> None:
    witness, enough = tmp_path / "witness", tmp_path / "enough"
    settings: dict[str, Any] = {
        "fleet": QUICK,
        "policy": {"sample_period_seconds": 0.2, "beat_seconds": 0.2},
        "simulated_devices": [{"kind": "sim-24g", "memory_mb": 24 * GIB}],
        "ray": {"spares": 1, "warm_runners": 0},
    }
    with ServiceProcess(tmp_path / "data", **settings) as service:
        admin = service.broker
        token = admin.create_token("ops", scopes=["cluster:write", "tasks:write"])
        filler = Submission("tests.e2e.work:hold", str(witness), str(enough), gpus=1, grace_seconds=5)
        Broker(url=service.url, token=token.token).create_idle_template("fill", filler, max_running=3)

        def running() -> list[str]:
            return [task.id for task in admin.list(name="idle/fill", state=["running"])]

        until(lambda: len(running()) == 1, "the idle GPU is filled")
        [first] = running()
        assert (admin.get(first).priority, admin.get(first).tenant) == (0, "default")
        assert len(admin.gpus(idle=True)) == 1  # idle as ever: its work is a template's
        enough.touch()
        until(lambda: admin.get(first).state == "succeeded", "the first one has ended")
        enough.unlink()
        until(lambda: running() not in ([], [first]), "the next one follows")

        [second] = running()
        until(lambda: second in witness.read_text(), "it is at work")
        high = admin.submit("tests.e2e.work:add", 1, 2, gpus=1, priority=50)
        assert admin.result(high) == 3
        until(lambda: admin.get(second).preemptions == 1, "the template's task made room")
        until(lambda: running() == [second], "it has the GPU again")

        admin.revoke_token("ops")
        [template] = admin.idle_templates()
        assert template.stopped is not None
        assert "was deleted" in template.stopped
        enough.touch()
        until(lambda: admin.get(second).state == "succeeded", "it goes on to its end")
        until(lambda: all(one.leased_mb == 0 for one in admin.gpus()), "the GPU is free")
        after = admin.submit("tests.e2e.work:add", 3, 4, gpus=1)
        assert admin.result(after) == 7
        until(lambda: len(admin.gpus(idle=True)) == 1, "it is idle again")
        assert list(admin.list(name="idle/fill", state=["pending", "admitted", "running"])) == []


def test_template_without_gpus_fills_a_machine_yields_and_is_deleted(
    tmp_path: Path,
) -> None:
    """The engine is simulated: how busy a real machine is, other tests decide."""
    settings: dict[str, Any] = {
        "engine": "simulated",
        "fleet": QUICK,
        "policy": {"sample_period_seconds": 0.2, "beat_seconds": 0.2},
    }
    with ForkedService(tmp_path / "data", **settings) as service:
        admin = service.broker
        until(lambda: len(admin.nodes()) == 1, "its node is there")  # a service is ready without
        [node] = admin.nodes()
        everything: dict[str, Any] = {"cpu": node.cpu.total}
        long = Submission("tests.e2e.work:wait", kwargs={"seconds": 600}, grace_seconds=5, **everything)
        admin.create_idle_template("fill", long, max_running=3)

        def alive(*states: str) -> list[str]:
            return [task.id for task in admin.list(name="idle/fill", state=list(states))]

        until(lambda: len(alive("running")) == 1, "the idle machine is filled")
        [first] = alive("running")
        other = admin.submit("tests.e2e.work:wait", kwargs={"seconds": 0}, priority=10, **everything)
        assert admin.wait(other, timeout_seconds=PATIENCE_SECONDS).state == "succeeded"
        assert admin.get(first).preemptions == 1
        until(lambda: alive("running") == [first], "it goes on")

        admin.delete_idle_template("fill")
        assert list(admin.idle_templates()) == []
        assert admin.get(first).state == "running"
        admin.cancel(first, grace_seconds=0)
        assert admin.wait(first, timeout_seconds=PATIENCE_SECONDS).state == "cancelled"
        admin.create_idle_template("next", long, max_running=3)
        until(
            lambda: len(list(admin.list(name="idle/next", state=["running"]))) == 1, "the next one fills it"
        )
        assert alive("pending", "admitted", "running") == []
