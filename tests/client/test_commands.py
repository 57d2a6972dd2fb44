"""Every command against the real service, with the simulated engine."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from gpubroker.cli.app import app
from typer.core import TyperGroup
from typer.main import get_command

from tests.chaos.forked import ForkedService
from tests.client.command_line import Run, command_line
from tests.e2e.service_process import ROOT, ServiceProcess, until

WORK = "tests.e2e.work:hold"
"""An entrypoint that the service allows; here it waits for `seconds` and returns nothing."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ForkedService(tmp_path_factory.mktemp("service") / "data", engine="simulated") as running:
        yield running


@pytest.fixture
def gpubroker(
    service: ServiceProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """The command line on the service's own machine."""
    monkeypatch.setenv("GPUBROKER_DATA_DIR", str(service.data_dir))
    return command_line(monkeypatch, capsys)


@pytest.fixture
def holder(service: ServiceProcess) -> Iterator[str]:
    """A task that holds both GPUs until the test is over."""
    with service.broker as broker:
        task = broker.submit(WORK, kwargs={"seconds": 600}, gpus=2, name="holder", priority=100)
        until(lambda: broker.get(task).state == "running", "the holder runs")
        yield task.id
        broker.cancel(task)
        broker.wait(task)


def test_a_task_is_submitted_and_its_result_is_printed(gpubroker: Run) -> None:
    submitted = gpubroker(f"submit {WORK} -i seconds=0 --gpu-memory 2GiB --name fit --label run=a --wait")
    assert (submitted.code, submitted.out) == (0, "null\n")
    shown = gpubroker("show last -o json").json
    assert (shown["name"], shown["state"], shown["labels"]) == ("fit", "succeeded", {"run": "a"})
    assert shown["resources"]["gpu_mb"] == 2048
    for text in ("fit", "succeeded", WORK, "2.0 GiB", "run=a"):
        assert text in gpubroker("show last").out
    assert gpubroker("logs last").code == 0
    assert gpubroker("outputs last").code == 0
    assert gpubroker("wait last -o json").json["state"] == "succeeded"
    assert gpubroker("result last").out == "null\n"
    assert gpubroker("result last -o json").json["result"] is None
    happened = gpubroker("events", shown["id"], "-o", "ndjson").out.splitlines()
    kinds = [json.loads(line)["kind"] for line in happened]
    assert kinds[0] == "task.submitted"
    assert {"task.admitted", "task.succeeded", "lease.released"} <= set(kinds)
    assert "task.succeeded" in gpubroker("events --last 20").out
    [again] = (shown["id"] for shown in gpubroker("retry last -o json").json)
    assert gpubroker(f"wait {again} -o json").json["state"] == "succeeded"
    assert [known["subject"] for known in gpubroker("estimates fit -o json").json] == ["fit"]
    assert "fit" in gpubroker("estimates").out


def test_a_task_is_submitted_held_and_runs_after_its_release(gpubroker: Run) -> None:
    assert gpubroker(f"submit {WORK} -i seconds=0 --name held --hold").code == 0
    assert gpubroker("show held -o json").json["held"]
    assert "Held" in gpubroker("explain held").out
    assert gpubroker("release held").code == 0
    assert gpubroker("wait held -o json").json["state"] == "succeeded"


def test_tasks_of_a_file_run_after_others_of_it(gpubroker: Run, tmp_path: Path) -> None:
    run = {"entrypoint": WORK, "kwargs": {"seconds": 0}}
    tasks: list[dict[str, Any]] = [
        {"name": "first"},
        {"name": "second", "after": [0]},
        {"name": "third", "after": ["second"]},
    ]
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(json.dumps({"run": run, **task}) for task in tasks))
    ids = gpubroker(f"submit --batch {file}").out.split()
    shown = [gpubroker("wait", id, "-o", "json").json for id in reversed(ids)][::-1]
    assert [[it["task"] for it in task["after"]] for task in shown] == [[], ids[:1], ids[1:2]]
    assert [task["state"] for task in shown] == ["succeeded"] * 3
    ends = [task["finished_at"] for task in shown]
    assert ends == sorted(ends)


def test_pending_task_is_explained_held_released_changed_and_cancelled(gpubroker: Run, holder: str) -> None:
    task_id = gpubroker(f"submit {WORK} --gpu-memory 18GiB --name waiting --priority batch").out.strip()
    listed = gpubroker("ps").out.splitlines()
    assert listed[0].split()[:3] == ["ID", "NAME", "STATE"]
    assert any(task_id[-8:] in line and "needs 18.0 GiB" in line for line in listed)
    assert any(holder[-8:] in line and "running" in line for line in listed)

    explained = gpubroker("explain", task_id).out
    assert "WaitingForMemory: needs 18.0 GiB" in explained
    assert "position 1 of 1" in explained
    assert "holder 24.0 GiB (priority 100)" in explained

    assert gpubroker("hold", task_id).code == 0
    assert "\nHeld: " in gpubroker("explain last").out
    assert gpubroker("release", task_id[-8:]).code == 0
    assert gpubroker("priority", task_id, "interactive", "-o", "json").json[0]["band"] == "interactive"
    cancelled = gpubroker("cancel", task_id, "--reason", "wrong data")
    assert "cancelled" in cancelled.out
    assert "wrong data" in gpubroker("events", task_id).out
    assert gpubroker("wait", task_id).code == 4
    assert gpubroker("cancel", task_id).code == 0
    assert gpubroker("explain", task_id).code == 0


def test_a_refused_submit_says_why(gpubroker: Run) -> None:
    refused = gpubroker("submit os:system -a true")
    assert (refused.code, refused.out) == (6, "")
    assert "tests.e2e.work:*" in refused.err
    too_large = gpubroker(f"submit {WORK} --gpu-memory 30GiB")
    assert too_large.code == 6
    assert "24.0 GiB of sim-24g" in too_large.err


def test_the_stack_of_a_run_is_shown_or_why_there_is_none(gpubroker: Run, holder: str) -> None:
    assert gpubroker("stack", holder).out == "a simulated run has no process\n"
    assert gpubroker("stack", holder, "-o", "json").json["stack"] is None
    beyond = gpubroker("stack", holder, "--rank", "1")
    assert (beyond.code, "it has 1 rank" in beyond.err) == (6, True)


def test_devices_nodes_and_totals_are_shown(gpubroker: Run, holder: str) -> None:
    gpus = gpubroker("gpus").out
    assert "2 GPUs (simulated)   leased 48.0" in gpus
    assert gpus.count("holder 24.0") == 2
    assert gpus.count("0.0 GiB free of 24.0") == 2
    [node] = gpubroker("nodes -o json").json
    assert node["gpus"] == 2
    assert re.search(r"^local +ready .* 1/256 +2 *$", gpubroker("nodes").out, re.MULTILINE)
    totals = gpubroker("stats").out
    assert all(said in totals for said in ("leased 48.0 GiB", "running 1", "executor", "(simulated)"))


def test_without_a_quarantined_holder_release_is_refused(gpubroker: Run, holder: str) -> None:
    assert gpubroker("quarantine").out == "nothing is in quarantine\n"
    ended = gpubroker(f"quarantine release {holder} --because looked --yes")
    assert (ended.code, f"nothing of {holder!r} is in quarantine" in ended.err) == (6, True)


def test_without_silent_nodes_resume_is_refused(gpubroker: Run) -> None:
    ended = gpubroker("resume --because looked")
    assert (ended.code, "no silent node" in ended.err) == (6, True)


def test_the_demand_of_autoscalers_is_shown(gpubroker: Run, holder: str) -> None:
    waiting = gpubroker(f"submit {WORK} -i seconds=0 --gpus 1").out.strip()
    shown = gpubroker("demand").out
    assert re.search(r"^unmet +1 GPUs \(24\.0 GiB\).* 1 tasks, up to", shown, re.MULTILINE)
    assert re.search(r"^needed +3 GPUs", shown, re.MULTILINE)
    assert re.search(r"^spare +nothing", shown, re.MULTILINE)
    assert gpubroker("demand --kind H100 --waited 1h -o json").json["unmet"]["gpus"] == 0
    assert gpubroker("cancel", waiting).code == 0


def test_targets_are_shown_with_what_is_measured(gpubroker: Run, holder: str) -> None:
    row = re.compile(r"^all +gpu_utilization +60% to 80% +100% ! ", re.MULTILINE)
    until(lambda: row.search(gpubroker("targets").out) is not None, "the fleet has been looked at")
    assert gpubroker("targets -o json").json[0]["measure"] == "gpu_utilization"


def test_idle_templates_are_made_listed_and_deleted(gpubroker: Run, tmp_path: Path) -> None:
    file = tmp_path / "task.json"
    file.write_text('{"run": {"entrypoint": "tests.client.jobs:add"}')
    assert "cannot read a task" in gpubroker(f"idle-template create sweep {file} --max-running 2").err
    file.write_text("[]")
    assert "has no task" in gpubroker(f"idle-template create sweep {file} --max-running 2").err
    file.write_text(f'{{"run": {{"entrypoint": "{WORK}"}}, "resources": {{"gpus": 1}}}}')
    assert gpubroker(f"idle-template create sweep {file} --max-running 2 --weight 3").code == 0
    assert re.search(r"^sweep +3 +0 of 2 +0 +.*active", gpubroker("idle-template list").out, re.MULTILINE)
    assert gpubroker(f"idle-template create sweep {file} --max-running 2").code == 6
    assert gpubroker("idle-template delete sweep").code == 0
    assert gpubroker("idle-template list -o json").json == []


def test_slurm_starts_a_node_for_each_gpu_that_is_lacked(
    gpubroker: Run, holder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for Slurm's commands, which write down how they were called."""
    called = tmp_path / "called"
    programs = {"squeue": "echo 17 PENDING", "sbatch": f'echo "sbatch $*" >> {called}'}
    for name, does in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("WAITED", "0s")
    waiting = [gpubroker(f"submit {WORK} -i seconds=0 --gpus 1").out.strip() for _ in range(3)]
    ended = apart(str(ROOT / "deploy/slurm/gpubroker-scale.sh"))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert called.read_text() == "sbatch gpubroker-node.sbatch\n" * 2, "one of three is on its way"
    assert gpubroker("cancel", *waiting).code == 0


def test_a_gpu_is_closed_and_reopened(gpubroker: Run) -> None:
    assert "! closed: a fan" in gpubroker("close-gpu local/gpu0 --because", "a fan").out
    assert "! closed: a fan" in gpubroker("gpus").out
    assert gpubroker("reopen-gpu local/gpu0 -o json").json["closed"] is None
    ended = gpubroker("close-gpu elsewhere/gpu0")
    assert (ended.code, "GPUs: local/gpu0" in ended.err) == (6, True)


def test_a_node_is_closed_emptied_and_opened(gpubroker: Run) -> None:
    assert "cordoned" in gpubroker("cordon local --because", "a fan").out
    assert gpubroker("drain local --deadline 1h -o json").json["drain"]["deadline_at"] is not None
    assert "ready" in gpubroker("uncordon local").out
    assert "no roots are configured" in gpubroker("disk local").out
    assert "no roots are configured" in gpubroker("clean local --yes").out
    ended = gpubroker("cordon elsewhere")
    assert (ended.code, "nodes: local" in ended.err) == (6, True)


def test_tenants_and_policy_are_shown(gpubroker: Run, holder: str) -> None:
    assert "default" in gpubroker("tenants").out
    assert "interactive" in gpubroker("policy").out


def test_a_queue_is_paused_and_resumed(gpubroker: Run) -> None:
    assert "tenant default is paused since" in gpubroker("pause --tenant default --because moving").out
    task = gpubroker(f"submit {WORK} -i seconds=0 --name waits").out.strip()
    assert "tenant default was paused" in gpubroker("ps").out
    assert "QueuePaused: " in gpubroker("explain", task).out
    assert "1 paused" in gpubroker("tenants").out
    assert "(moving), 1 tasks wait" in gpubroker("stats").out
    assert gpubroker("resume --tenant default").out == "tenant default is not paused\n"
    assert gpubroker("wait", task, "-o", "json").json["state"] == "succeeded"
    unknown = gpubroker("pause --stream nobody")
    assert (unknown.code, "no work stream" in unknown.err) == (6, True)


@pytest.mark.parametrize(
    "line", ["pause", "pause --tenant a --stream b", "resume", "resume --tenant a --stream b --because c"]
)
def test_a_pause_is_of_one_queue(gpubroker: Run, line: str) -> None:
    assert gpubroker(line).code == 2


def test_a_task_has_the_sizes_of_the_profile_that_it_names(gpubroker: Run) -> None:
    assert re.search(r"^trainer +4 +1 +1 *$", gpubroker("profiles").out, re.MULTILINE)
    line = f"submit {WORK} -i seconds=0 --profile rollout_worker --max-concurrency 8 --hold -o json"
    task = gpubroker(line).json
    assert (task["profile"], task["max_concurrency"]) == ("rollout_worker", 8)
    assert (task["resources"]["cpu"], task["resources"]["gpus"]) == (1.0, 0)
    assert "rollout_worker" in gpubroker("show", task["id"]).out
    assert gpubroker("cancel", task["id"]).code == 0


def test_a_token_is_created_used_listed_and_revoked(gpubroker: Run) -> None:
    secret = gpubroker(
        "token create reader --scope tasks:read --max-priority background --expires 1h"
    ).out.strip()
    listed = gpubroker("token list").out
    assert re.search(r"^reader +default +24 +tasks:read ", listed, re.MULTILINE)
    assert secret not in listed
    assert gpubroker("--token", secret, "ps").code == 0
    assert "lacks the scope cluster:read" in gpubroker("--token", secret, "stats").err
    assert gpubroker("token revoke reader").code == 0
    assert gpubroker("--token", secret, "ps").code == 6


def apart(*words: str) -> "subprocess.CompletedProcess[str]":
    """For commands that replace or end their process."""
    return subprocess.run(words, capture_output=True, text=True)


def test_commands_that_need_no_service_work_without_one(gpubroker: Run, tmp_path: Path) -> None:
    assert gpubroker("version").out.startswith("gpubroker ")
    for outside in (gpubroker("progress 0.5"), gpubroker("checkpoint"), gpubroker("complete")):
        assert (outside.code, "inside a command that gpubroker runs" in outside.err) == (2, True)
    document: dict[str, Any] = yaml.safe_load(gpubroker("openapi").out)
    assert "/tasks" in document["paths"]
    assert "from --set port" in gpubroker("config check --set port=1").out
    assert "the database is now at" in gpubroker("migrate --data-dir", str(tmp_path / "new")).err
    assert "the database is now in lineage" in gpubroker("new-lineage --data-dir", str(tmp_path / "new")).err
    assert gpubroker("backup", str(tmp_path / "kept"), "--data-dir", str(tmp_path / "new")).code == 0
    again = str(tmp_path / "kept"), "--data-dir", str(tmp_path / "restored")
    assert "restored as of" in gpubroker("restore", *again).err
    refused_again = gpubroker("restore", *again)
    assert (refused_again.code, "exists" in refused_again.err) == (2, True)
    assert "no service has run in" in gpubroker("down --data-dir", str(tmp_path / "new")).err
    assert "no cluster local of" in gpubroker("cluster status --data-dir", str(tmp_path / "new")).err
    refused = apart("gpubroker", "serve", "--data-dir", "/dev/null/x")
    assert refused.returncode == 2
    assert "cannot write to the data directory" in refused.stderr


def test_a_lease_is_asked_for_shown_renewed_and_released(gpubroker: Run) -> None:
    lease = gpubroker("lease ask --gpu-memory 1GiB --ttl 10m --holder notebook").out.strip()
    until(lambda: gpubroker(f"lease show {lease} -o json").json["state"] == "held", "the lease is held")
    assert "notebook" in gpubroker("lease list").out
    assert "notebook" in gpubroker("gpus").out
    assert gpubroker(f"lease renew {lease} --ttl 20m").code == 0
    assert gpubroker(f"lease release {lease} -o json").json["state"] == "ended"
    assert lease not in gpubroker("lease list").out


def test_a_secret_comes_from_standard_input_and_reaches_a_task_by_name(
    gpubroker: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("very secret\n"))
    told = gpubroker("secrets set KEY")
    assert (told.code, "very secret" in told.out + told.err) == (0, False)
    assert gpubroker("secrets list -o json").json == [{"name": "KEY"}]
    assert gpubroker(f"submit {WORK} -i seconds=0 --env KEY=secret:KEY").code == 0
    assert gpubroker("secrets delete KEY").code == 0
    assert "no secret" in gpubroker(f"submit {WORK} -i seconds=0 --env KEY=secret:KEY").err


def test_lease_run_holds_memory_while_its_command_runs(gpubroker: Run) -> None:
    script = "import os, sys; sys.exit(len(os.environ['CUDA_VISIBLE_DEVICES'].split(',')))"
    ended = gpubroker("lease run --gpus 2 --", sys.executable, "-c", script)
    assert ended.code == 2
    assert "holding task_" in ended.err
    newest = gpubroker("lease list --all -o json").json[0]
    assert (newest["state"], newest["error"]) == ("ended", None)


def test_a_plan_says_whether_a_set_of_components_fits(gpubroker: Run, tmp_path: Path) -> None:
    plan = tmp_path / "fleet.yaml"
    plan.write_text("components:\n  - {name: trainer, count: 1, resources: {gpu_mb: 1024}}\n")
    assert gpubroker("plan -f", str(plan), "-o", "json").json["fits"] is True
    plan.write_text("components:\n  - {name: trainer, count: 1000, resources: {gpu_mb: 1024}}\n")
    assert gpubroker("plan -f", str(plan)).code == 8


def test_the_times_of_a_pending_task_are_changed(gpubroker: Run, holder: str) -> None:
    assert gpubroker(f"submit {WORK} -i seconds=0 --gpus 2").code == 0
    assert gpubroker("change last --queue-ttl 1h").code == 0
    assert gpubroker("show last -o json").json["queue_ttl_seconds"] == 3600
    assert gpubroker("change last --queue-ttl none").code == 0
    assert gpubroker("show last -o json").json["queue_ttl_seconds"] is None
    assert gpubroker("cancel last").code == 0
    assert "only while a task is pending" in gpubroker(f"change {holder} --queue-ttl 1h").err


def test_commands_that_need_postgresql_say_so_without_it(gpubroker: Run, tmp_path: Path) -> None:
    new = ["--data-dir", str(tmp_path / "new")]
    refused = [apart("gpubroker", "gateway", *new), apart("gpubroker", "broker", *new)]
    moved = gpubroker("migrate-data --to sqlite:///elsewhere.db", *new)
    assert [*(ended.returncode for ended in refused), moved.code] == [2, 2, 2]
    for message in (*(ended.stderr for ended in refused), moved.err):
        assert "postgresql" in message.lower()


def test_without_a_model_server_model_commands_say_what_to_configure(gpubroker: Run) -> None:
    listed = gpubroker("models")
    assert (listed.code, listed.out) == (0, "no models\n")
    assert (gpubroker("models -o json").code, gpubroker("models -o json").out.strip()) == (0, "[]")
    for refused in (gpubroker("load m"), gpubroker("unload m"), gpubroker("pin m")):
        assert refused.code == 6
        assert "give one of triton.servers its node" in refused.err
    asked = gpubroker("infer m -i x=1 --later")
    assert (asked.code, "set triton.servers" in asked.err) == (6, True)


def test_an_uploaded_object_is_listed_and_deleted(gpubroker: Run, tmp_path: Path) -> None:
    file = tmp_path / "pixels"
    file.write_bytes(bytes(5000))
    id = gpubroker("upload", str(file)).out.strip()
    listed = gpubroker("objects")
    assert (listed.code, id in listed.out) == (0, True)
    assert "your tenant uses 5 KiB of 4.0 GiB" in listed.err
    assert gpubroker("objects delete", id[-8:]).err == f"deleted {id}\n"
    assert gpubroker("objects -o json").json == []
    assert "you have no object" in gpubroker("objects delete", id).err


def test_a_worker_set_is_created_listed_scaled_and_ended(gpubroker: Run) -> None:
    made = gpubroker("workers create tests.e2e.work:Counter -j 1 --max 2 -i seconds=600 -o json")
    assert made.code == 0, made.err
    id = made.json["id"]
    assert gpubroker("workers list -o json").json[0]["id"] == id
    assert gpubroker(f"workers scale {id} 2").code == 0
    until(lambda: gpubroker("workers list -o json").json[0]["count"] == 2, "the leader has heard of it")
    assert id in gpubroker("workers end", id).err


def test_a_map_is_submitted_looked_at_and_cancelled(gpubroker: Run, tmp_path: Path) -> None:
    (tmp_path / "items").write_text("1\n2\n")
    array = gpubroker(f"map {WORK} -d --gpus 2 --items", str(tmp_path / "items")).out.strip()
    assert gpubroker(f"array {array} -o json").json["total"] == 2
    assert gpubroker(f"array {array} --cancel").code == 0


def test_a_process_that_is_not_there_is_not_healthy(gpubroker: Run, tmp_path: Path) -> None:
    ended = gpubroker("health --data-dir", str(tmp_path))
    assert (ended.code, ended.err.count("\n")) == (1, 1)


def test_the_doctor_and_work_streams_answer(gpubroker: Run, holder: str) -> None:
    assert (gpubroker("doctor -o json").code, gpubroker("streams -o json").json) == (0, [])


def test_this_file_covers_every_command() -> None:
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    tried = set(re.findall(r'gpubroker(?:\(f?"|", ")([\w-]+)', Path(__file__).read_text(encoding="utf-8")))
    assert set(group.list_commands(typer.Context(group))) <= tried
