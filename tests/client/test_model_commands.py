"""Models of servers on the command line."""

from typing import Any

from tests.client.command_line import Run
from tests.client.recorded_service import FULL_ID, RecordedService, Reply, a_problem, a_task

LLM: dict[str, Any] = {
    "name": "llm", "server": "main", "state": "resident", "task": "task_1", "priority": 79, "pinned": False,
    "gpu_mb": 18432, "node": "n1", "load_seconds": 20.0, "loaded_at": "2026-11-21T10:02:11.412Z",
    "wanted_until_at": None, "reason": "",
}  # fmt: skip
COLD = {**LLM, "name": "bert", "state": "cold", "gpu_mb": None, "priority": None, "loaded_at": None,
        "reason": "no such layer\n\nAt:\n  model.py"}  # fmt: skip


def test_models_lists_states_and_reasons(service: RecordedService, run: Run) -> None:
    service.reply_with(
        Reply(200, {"items": [LLM, COLD]}), Reply(200, {"items": []}), Reply(200, {"items": [LLM]})
    )
    shown = run("models")
    assert (shown.code, shown.err) == (0, "")
    for text in ("llm", "resident", "18.0 GiB", "79", "bert", "cold", "no such layer At: model.py"):
        assert text in shown.out
    assert run("models").out == "no models\n"
    assert [one["name"] for one in run("models -o json").json] == ["llm"]


def test_a_reason_that_models_of_a_server_share_is_said_once(service: RecordedService, run: Run) -> None:
    fault = {**COLD, "reason": "its node has not joined"}
    service.reply_with(Reply(200, {"items": [LLM, fault, {**fault, "name": "t5"}, {**COLD, "server": "b"}]}))
    shown = run("models").out
    assert shown.count("its node has not joined") == 1
    assert "! 2 models of main: its node has not joined" in shown
    assert "no such layer" in shown


def test_a_model_name_means_its_current_load(service: RecordedService, run: Run) -> None:
    runs = {"run": {"kind": "model", "model": "llm"}}
    now, before = a_task(FULL_ID, "running", **runs), a_task(FULL_ID[:-1] + "q", "succeeded", **runs)
    ended = {**now, "state": "failed"}
    none, one, both = (
        Reply(200, {"items": listed, "next_cursor": None, "has_more": False})
        for listed in ([], [now], [ended, before])
    )
    # Models are not among the tasks unless they are asked for.
    for found, meant in (([*[none] * 4, one], now), ([*[none] * 5, both], ended)):
        service.reply_with(*found, Reply(200, meant))
        assert run("show", "llm", "-o", "json").json["id"] == FULL_ID
        assert service.requests[-1].path == f"/tasks/{FULL_ID}"
        assert ("kind", "model") in service.requests[-2].params


def test_a_model_is_loaded_unloaded_and_pinned(service: RecordedService, run: Run) -> None:
    service.reply_with(
        Reply(202, {**LLM, "state": "waiting"}),
        Reply(202, {**LLM, "state": "draining"}),
        Reply(200, {**LLM, "pinned": True}),
        Reply(200, LLM),
    )
    assert run("load llm --priority 90 --wait 5").out.startswith("llm of 18.0 GiB on main: waiting\n")
    assert run("unload llm").out == "llm of 18.0 GiB on main: draining\n"
    assert run("pin llm").out == "llm of 18.0 GiB on main: resident, pinned\n"
    assert run("pin llm --off").code == 0
    sent = [(one.method, one.path) for one in service.requests]
    assert sent == [("POST", f"/models/llm/{verb}") for verb in ("load", "unload", "pin", "pin")]


def test_a_model_is_loaded_at_the_priority_of_a_band(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(202, LLM))
    assert run("load llm --priority critical").code == 0
    assert service.requests[0].body == {"wait_seconds": 0.0, "priority": "critical"}


def test_the_server_is_sent_with_every_change(service: RecordedService, run: Run) -> None:
    service.reply_with(*[Reply(200, LLM)] * 3)
    for command in ("load llm --server b", "unload llm --server b", "pin llm --server b"):
        assert run(command).code == 0
    assert [one.params for one in service.requests] == [[("server", "b")]] * 3


def test_a_model_that_is_not_loaded_yet_is_reported_as_requested(service: RecordedService, run: Run) -> None:
    waiting = {**LLM, "state": "waiting"}
    service.reply_with(Reply(202, waiting), Reply(202, waiting), Reply(202, waiting), Reply(200, LLM))
    for command in ("load llm", "pin llm"):
        shown = run(command)
        assert (shown.code, shown.err) == (0, "")
        assert shown.out == (
            "llm of 18.0 GiB on main: waiting\n"
            "requested, not in memory yet; to follow it: gpubroker models, gpubroker explain task_1\n"
        )
    waited = run("load llm --wait 5")
    assert (waited.code, waited.err) == (5, "gpubroker: llm was not in memory within 5 s\n")
    assert run("load llm --wait 5").code == 0


MEASURED: dict[str, Any] = {
    "name": "llm", "server": "main", "device": "GPU-5a2f8c1e-9d3b-4e7a-8f60-1b2c3d4e5f60",
    "kind": "NVIDIA H100 80GB HBM3", "batch_sizes": [1, 8], "measured_mb": 18432, "next_mb": 21197,
    "configured": False,
}  # fmt: skip


def test_measure_shows_what_a_model_took_and_what_its_next_load_leases(
    service: RecordedService, run: Run
) -> None:
    fixed = {**MEASURED, "batch_sizes": [], "next_mb": 20480, "configured": True}
    service.reply_with(Reply(200, MEASURED), Reply(200, fixed), Reply(200, MEASURED))
    shown = run("models measure llm")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out == (
        "llm took 18.0 GiB, asked with 1 and 8 rows\n"
        "on main, GPU GPU-5a2f8c1e-9d3b-4e7a-8f60-1b2c3d4e5f60 (NVIDIA H100 80GB HBM3)\n"
        "its next load leases 20.7 GiB, with its margin\n"
    )
    assert run("models measure llm").out.splitlines() == [
        "llm took 18.0 GiB, asked",
        *shown.out.splitlines()[1:2],
        "its next load leases 20.0 GiB, as the settings say (gpu_mb)",
    ]
    args = ("--batch-size", "1", "--batch-size", "4", "--shape", "image=3,224,224", "--wait", "60")
    assert run("models", "measure", "llm", *args, "--priority", "critical", "--server", "b").code == 0
    last = service.requests[-1]
    assert (last.method, last.path, last.params) == ("POST", "/models/llm/measure", [("server", "b")])
    assert last.body == {
        "batch_sizes": [1, 4], "shapes": {"image": [3, 224, 224]}, "wait_seconds": 60.0,
        "priority": "critical",
    }  # fmt: skip


def test_a_shape_that_is_none_is_a_wrong_argument(service: RecordedService, run: Run) -> None:
    shown = run("models", "measure", "llm", "--shape", "image=large")
    assert (shown.code, service.requests) == (2, [])
    assert "INPUT=3,224,224" in shown.err


def test_a_refused_measurement_says_why(service: RecordedService, run: Run) -> None:
    service.reply_with(a_problem(409, "not-measurable", "GPU GPU-sim-n1-0 is simulated"))
    shown = run("models measure llm")
    assert (shown.code, shown.err) == (6, "gpubroker: GPU GPU-sim-n1-0 is simulated\n")


def test_a_refused_or_failed_load_has_its_exit_code(service: RecordedService, run: Run) -> None:
    words = "model llm is not in memory (failed): no such layer"
    service.reply_with(
        a_problem(422, "exceeds-capacity"),
        a_problem(404, "not-found"),
        a_problem(502, "model-not-loaded", words),
        Reply(503, {"detail": "later", "code": "model-not-ready"}, {"Retry-After": "60"}),
    )
    assert [run("load llm").code for _ in range(2)] == [6, 6]
    failed = run("load llm")
    assert (failed.code, failed.out) == (1, "")
    assert words in failed.err
    assert run("load llm").code == 8
    named = run("load", "")
    assert named.code == 2
    assert "needs the name of a model" in named.err
