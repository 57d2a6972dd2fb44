"""`python -m bench simulate` with a few hours of a small cluster, under several policies."""

import json
import re
import subprocess
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.holders import External, Gang
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Dependency, Task
from gpubroker_server.core.domain.units import Instant, Mib, Seconds, TaskId
from gpubroker_server.core.world.events import NewEvent, submitted
from msgspec import to_builtins
from msgspec.structs import replace

from bench import simulate
from bench.openb.trace import NODES
from bench.processes import ROOT, service
from bench.simulate.history import NoHistory, a_history
from bench.simulate.replay import Outcome, Replay
from bench.simulate.workload import Job, NoTrace, Workload, a_day, a_node, an_openb_day
from tests.patience import PATIENCE_SECONDS

GIB = 1024
MANUAL = (ROOT / "docs/how-to/compare-policies.md").read_text(encoding="utf-8")
[COMMANDS] = re.findall(r"^```sh\n(.*?)^```", MANUAL, re.MULTILINE | re.DOTALL)


def a_workload(*jobs: Job, gpus: int = 1) -> Workload:
    node, devices = a_node("n1", gpus, 64.0, 512 * GIB, "H100", 80 * GIB)
    return Workload("test", [node], devices, jobs)


def job(
    name: str, at: float, seconds: float, *, gib: int, priority: int = 50, checkpoints: bool = True
) -> Job:
    demand = Demand(gpus=1, gpu_mb=Mib(gib * GIB))
    return Job(Task(TaskId(name), "red", name, priority, demand, Instant(at)), seconds, checkpoints)


def test_utilisation_is_the_leased_share_of_memory_over_the_submit_times() -> None:
    outcome = Replay(a_workload(job("a", 0, 100, gib=40), job("b", 200, 1, gib=40)), Policy()).run()
    assert outcome.ended == 2
    assert outcome.seconds == 200
    assert outcome.figures()["utilisation"][0] == pytest.approx(100 * 0.5 * 100.1 / 200)


def test_a_preempted_run_without_checkpoints_loses_its_work() -> None:
    def lost(*, checkpoints: bool) -> Outcome:
        victim = job("low", 0, 1000, gib=60, priority=20, checkpoints=checkpoints)
        return Replay(a_workload(victim, job("high", 500, 10, gib=60, priority=90)), Policy()).run()

    assert (lost(checkpoints=True).preemptions, lost(checkpoints=True).lost_gpu_seconds) == (1, 0.0)
    assert lost(checkpoints=False).lost_gpu_seconds == pytest.approx(499.9)
    assert lost(checkpoints=False).drained_seconds > lost(checkpoints=True).drained_seconds + 400


def test_seed_gives_the_same_results_again_and_another_policy_others() -> None:
    workload = a_day(3, hours=1.5, gpus=8, load=1.5)
    shipped, again = Replay(workload, Policy()).run(), Replay(workload, Policy()).run()
    assert shipped == again
    assert shipped.preemptions > 0
    calm = Replay(workload, replace(Policy(), preemption=False)).run()
    assert calm.preemptions == 0
    assert calm.ended == shipped.ended == len(workload.jobs)
    assert calm.waits != shipped.waits


class Recorded(Replay):
    """Records the events that a service would have exported."""

    def __init__(self, workload: Workload, policy: Policy) -> None:
        self.recorded: list[str] = []
        super().__init__(workload, policy)

    def _apply(self, events: Iterable[NewEvent]) -> None:
        lines = list(events)
        for event in lines:
            line = {
                "kind": event.kind,
                "key": event.key,
                "at": float(self._now),
                "fields": dict(event.fields),
            }
            self.recorded.append(json.dumps(line))
        super()._apply(lines)


def _inventory(workload: Workload) -> Iterator[str]:
    for node in workload.nodes:
        yield json.dumps({"kind": "node.seen", "key": node.name, "at": 0.0, "fields": to_builtins(node)})
    for device in workload.devices:
        yield json.dumps({"kind": "device.seen", "key": device.key, "at": 0.0, "fields": to_builtins(device)})


def test_a_service_is_replayed_from_its_events(tmp_path: Path) -> None:
    workload = a_day(4, hours=1.0, gpus=8, load=1.0)
    recorded = Recorded(workload, replace(Policy(), preemption=False))
    first = recorded.run()
    path = tmp_path / "may.ndjson"
    path.write_text("\n".join([*_inventory(workload), *recorded.recorded]))
    read = a_history(path)
    assert (read.name, len(read.devices), len(read.jobs)) == ("history-may", 8, len(workload.jobs))
    again = Replay(read, replace(Policy(), preemption=False)).run()
    assert again.waits == first.waits


def test_an_incomplete_history_is_refused_with_the_command_to_export_one(tmp_path: Path) -> None:
    path = tmp_path / "half.ndjson"
    path.write_text('{"kind": "task.started", "key": "t", "at": 1.0, "fields": {}}\n')
    with pytest.raises(NoHistory, match=r"0 devices and 0 tasks.*gpubroker events"):
        a_history(path)


def test_external_leases_are_left_out_of_a_replay_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = a_day(4, hours=1.0, gpus=8, load=1.0)
    recorded = Recorded(workload, Policy())
    recorded.run()
    lease = replace(
        workload.jobs[0].task, id=TaskId("task_lease"), holder=External(ttl_seconds=Seconds(60.0))
    )
    submit = submitted(lease)
    lease_events = [
        {"kind": submit.kind, "key": submit.key, "at": 1.0, "fields": dict(submit.fields)},
        {"kind": "task.started", "key": submit.key, "at": 2.0, "fields": {}},
        {"kind": "task.succeeded", "key": submit.key, "at": 3.0, "fields": {}},
    ]
    path = tmp_path / "may.ndjson"
    path.write_text("\n".join([*_inventory(workload), *recorded.recorded, *map(json.dumps, lease_events)]))
    read = a_history(path)
    assert len(read.jobs) == len(workload.jobs)
    assert "left out: 1 external leases" in capsys.readouterr().err


def test_file_that_is_no_history_is_refused_with_the_command_to_export_one(tmp_path: Path) -> None:
    with pytest.raises(NoHistory, match=r"cannot read .*nothing.*gpubroker events"):
        a_history(tmp_path / "nothing")
    path = tmp_path / "other"
    for text in ("no JSON", "3", '{"kind": "task.started"}'):
        path.write_text(text)
        with pytest.raises(NoHistory, match=r"one event as JSON per line.*gpubroker events"):
            a_history(path)


def test_a_replay_reports_its_progress() -> None:
    lines: list[str] = []
    Replay(a_day(4, hours=1.0, gpus=8, load=1.0), Policy()).run(lines.append)
    assert [line.partition(" of ")[0] for line in lines][-1] == "100 %"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x:speed=3", "no setting 'speed'; settings: ageing"),
        ("x:preemption=1", "true or false"),
        ("x:preemption_budget=a", "takes a int"),
    ],
)
def test_a_wrong_policy_is_refused_with_the_names_of_the_settings(text: str, why: str) -> None:
    with pytest.raises(ArgumentTypeError, match=why):
        simulate.named_policy(text)


def test_a_policy_can_come_from_the_configuration_file_of_a_service(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("policy: {preemption: false, tenants: {red: {weight: 3}}}")
    name, policy = simulate.named_policy(f"fair:@{path}")
    assert (name, policy.preemption, policy.tenant("red").weight) == ("fair", False, 3.0)
    path.write_text("policy: {preemptions: false}")
    with pytest.raises(ArgumentTypeError, match="preemptions"):
        simulate.named_policy(f"fair:@{path}")


def test_gang_begins_when_all_ranks_are_ready_and_releases_all_its_devices() -> None:
    rank = Demand(gpus=1, gpu_mb=Mib(60 * GIB))
    gang = Job(
        Task(TaskId("gang"), "red", "gang", 20, Demand(bundles=(rank,) * 2), Instant(0), holder=Gang()),
        100,
        False,
    )
    outcome = Replay(a_workload(gang, job("high", 50, 10, gib=60, priority=90), gpus=2), Policy()).run()
    assert (outcome.ended, outcome.preemptions) == (2, 1)
    assert outcome.lost_gpu_seconds == pytest.approx(2 * 49.9)


def test_dependencies_and_expiry_are_replayed() -> None:
    first, late = job("first", 0, 100, gib=60), job("late", 1, 10, gib=60)
    second = job("second", 2, 10, gib=10)
    after = replace(second.task, after=(Dependency(first.task.id),), awaits=True)
    late = replace(late, task=replace(late.task, deadline_at=Instant(50.0)))
    outcome = Replay(a_workload(first, late, replace(second, task=after)), Policy()).run()
    assert (outcome.ended, outcome.expired) == (3, 1)
    assert outcome.waits["batch"] == [0.0, pytest.approx(98.1)]


def test_fragmentation_is_the_free_share_that_usual_demands_cannot_use() -> None:
    """50 of 80 GiB are taken; half of the usual demands need more than the rest."""
    jobs = [job("stays", 0, 1000, gib=50), *(job(f"t{i}", 10 + i, 1, gib=40) for i in range(9))]
    outcome = Replay(a_workload(*jobs, job("last", 500, 1, gib=1)), Policy()).run()
    assert 50.0 < outcome.figures()["fragmentation"][0] <= 100.0


def test_each_tenant_has_its_share_of_use() -> None:
    blue = job("b", 0, 100, gib=30)
    blue = replace(blue, task=replace(blue.task, tenant="blue"))
    figures = Replay(a_workload(job("a", 0, 300, gib=30), blue), Policy()).run().figures()
    assert figures["share.blue"][0] == pytest.approx(25, abs=0.1)
    assert figures["share.red"][0] == pytest.approx(75, abs=0.1)


def test_a_trace_is_replayed_with_its_submit_times_and_run_times(tmp_path: Path) -> None:
    (tmp_path / NODES).write_text("sn,cpu_milli,memory_mib,gpu,model\nn1,8000,65536,2,T4\n")
    head = (
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,creation_time,deletion_time,scheduled_time"
    )
    rows = [
        "whole,1000,1024,1,1000,,LS,100,400,150",
        "part,1000,1024,1,500,,BE,100,300,",
        "cpu,1000,1024,0,0,,Burstable,200,210,200",
        "never,1000,1024,4,1000,,LS,120,130,125",
    ]
    (tmp_path / "openb_pod_list_default.csv").write_text("\n".join([head, *rows]))
    workload = an_openb_day(tmp_path, nodes=1)
    ran = {
        found.task.id: (found.task.submitted_at, found.seconds, found.task.priority)
        for found in workload.jobs
    }
    assert ran == {"part": (100, 200, 20), "whole": (100, 250, 70), "cpu": (200, 10, 50)}
    assert Replay(workload, Policy()).run().ended == 3


def test_the_commands_of_the_docs_replay_a_real_service(tmp_path: Path) -> None:
    task = {
        "run": {"entrypoint": "bench.tasks:noop", "kwargs": {"seconds": 1.0}},
        "resources": {"gpu_mb": 1024},
    }
    path = tmp_path / "history.ndjson"
    with service(
        ENGINE="simulated", SIMULATED_DEVICES='[{"memory_mb": 1536}]', ENTRYPOINTS="bench.tasks:*"
    ) as on:
        first = on.ask("POST", "/tasks", task)["id"]
        cancelled = on.ask("POST", "/tasks", task)["id"]
        on.ask("POST", f"/tasks/{cancelled}/cancel", {})
        last = on.ask("POST", "/tasks", {**task, "after": [first], "not_before": "2000-01-01T00:00:00Z"})[
            "id"
        ]
        on.wait_until(last, "succeeded")
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "GPUBROKER_URL": f"http://127.0.0.1:{on.port}",
            "GPUBROKER_TOKEN": on.token,
        }
        typed = ["bash", "-euo", "pipefail", "-c", COMMANDS]
        ran = subprocess.run(
            typed, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=PATIENCE_SECONDS
        )
    assert ran.returncode == 0, ran.stderr
    assert "2 tasks" in ran.stderr
    assert re.search(r"^ +shipped +calm$", ran.stderr, re.MULTILINE)
    assert {json.loads(line)["figure"].split(".")[2] for line in ran.stdout.splitlines()} == {
        "shipped",
        "calm",
    }
    workload = a_history(path)
    assert [found.task.id for found in workload.jobs] == [first, last]
    assert all(found.seconds > 0.9 for found in workload.jobs)
    assert Replay(workload, Policy()).run().ended == 2


def test_the_table_has_a_dash_if_no_task_of_a_band_waited() -> None:
    some, none = Outcome(1, waits={"batch": [1.0], "idle": [2.0]}), Outcome(1, waits={"batch": [3.0]})
    rows = {line.split()[0]: line.split()[1:] for line in simulate.table({"a": none, "b": some})}
    assert rows["wait.batch.mean"] == ["3.0", "1.0", "s"]
    assert rows["wait.idle.mean"] == ["-", "2.0", "s"]


def test_a_missing_trace_or_one_without_submit_times_is_refused(tmp_path: Path) -> None:
    (tmp_path / NODES).write_text("sn,cpu_milli,memory_mib,gpu,model\nn1,8000,65536,2,T4\n")
    (tmp_path / "openb_pod_list_bare.csv").write_text("name,num_gpu\na,1\n")
    with pytest.raises(NoTrace, match="traces: bare"):
        an_openb_day(tmp_path, 1, "other")
    with pytest.raises(NoTrace, match="'bare' has no submit times"):
        an_openb_day(tmp_path, 1, "bare")


def test_policies_are_compared_in_one_run() -> None:
    parser = ArgumentParser()
    simulate.add_options(parser)
    options = parser.parse_args(
        [
            "--day",
            "3",
            "--hours",
            "1",
            "--gpus",
            "8",
            "--policy",
            "shipped",
            "--policy",
            "calm:preemption=false",
        ]
    )
    figures = {figure.figure: figure.value for figure in simulate.measure(options)}
    assert figures["simulate.day3.calm.preemptions"] == 0
    assert figures["simulate.day3.shipped.utilisation"] > 0
