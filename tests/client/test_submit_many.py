"""Many tasks in one call, from Python and from the command line, against recorded answers."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from gpubroker import BrokerError, Refused, Submission, WrongArgument

from tests.client.command_line import Run
from tests.client.conftest import Do
from tests.client.recorded_service import RecordedService, Reply, a_problem


def accepted(*ids: str) -> list[dict[str, Any]]:
    return [{"status": 202, "id": id, "url": f"/tasks/{id}"} for id in ids]


def refused(pointer: str, code: str = "validation-failed", status: int = 422) -> dict[str, Any]:
    fault = {"pointer": pointer, "detail": "is wrong", "code": "wrong"}
    return {"status": status, "problem": {"code": code, "detail": f"{pointer} is wrong", "errors": [fault]}}


def answered(*items: dict[str, Any], status: int = 207) -> Reply:
    return Reply(status, {"accepted": 0, "refused": 0, "items": list(items)})


def test_each_task_has_its_id_or_its_error_in_order(service: RecordedService, do: Do) -> None:
    service.reply_with(answered(*accepted("task_a"), refused("/tasks/1/nmae"), *accepted("task_c")))
    first, second, third = do(
        "submit_many", [Submission("a:b", 1, gpu_mb=1024), {"run": {}, "nmae": 1}, Submission(["true"])]
    )
    assert (first, third) == ("task_a", "task_c")
    assert isinstance(second, Refused)
    assert (second.code, second.errors[0]["pointer"]) == ("validation-failed", "/tasks/1/nmae")
    [request] = service.requests
    assert (request.method, request.path) == ("POST", "/tasks/batch")
    assert request.body == {
        "tasks": [
            {"run": {"entrypoint": "a:b", "args": [1], "kwargs": {}}, "resources": {"gpu_mb": 1024}},
            {"run": {}, "nmae": 1},
            {"run": {"command": ["true"]}},
        ]
    }


def test_thousands_are_sent_in_parts_with_a_key_each(service: RecordedService, do: Do) -> None:
    ids = [f"task_{n}" for n in range(2500)]
    service.reply_with(*(answered(*accepted(*ids[at : at + 1000])) for at in (0, 1000, 2000)))
    assert list(do("submit_many", ({"run": {"n": n}} for n in range(2500)), idempotency_key="k")) == ids
    assert [len(request.body["tasks"]) for request in service.requests] == [1000, 1000, 500]
    assert [request.headers["idempotency-key"] for request in service.requests] == ['"k-0"', '"k-1"', '"k-2"']


def test_large_tasks_are_sent_in_smaller_parts(service: RecordedService, do: Do) -> None:
    service.reply_with(answered(*accepted("task_1", "task_2")), answered(*accepted("task_3")))
    large = {"run": {"entrypoint": "a:b", "args": ["x" * 3_000_000]}}
    assert list(do("submit_many", [large] * 3)) == ["task_1", "task_2", "task_3"]
    assert [len(request.body["tasks"]) for request in service.requests] == [2, 1]


def test_all_or_nothing_is_one_request_and_raises_what_is_wrong(service: RecordedService, do: Do) -> None:
    service.reply_with(a_problem(422, "batch-refused", "1 of 1500 tasks cannot be accepted"))
    with pytest.raises(Refused) as error:
        do("submit_many", [{"run": {}}] * 1500, all_or_nothing=True, idempotency_key="k")
    assert error.value.code == "batch-refused"
    [request] = service.requests
    assert request.body["all_or_nothing"] is True
    assert request.headers["idempotency-key"] == '"k"'


def test_too_many_tasks_for_all_or_nothing_are_refused(service: RecordedService, do: Do) -> None:
    with pytest.raises(WrongArgument, match="10000"):
        do("submit_many", [{"run": {}}] * 10_001, all_or_nothing=True)
    assert service.requests == []


def test_without_tasks_nothing_is_sent(service: RecordedService, do: Do) -> None:
    assert list(do("submit_many", [])) == []
    assert service.requests == []


def test_accepted_ids_are_returned_although_a_later_part_fails(service: RecordedService, do: Do) -> None:
    service.reply_with(
        answered(*accepted(*(f"task_{n}" for n in range(1000)))), a_problem(401, "unauthenticated")
    )
    answers = do("submit_many", [{"run": {}}] * 2001)
    assert answers[999] == "task_999"
    assert len(answers) == 2001
    assert all(isinstance(answer, BrokerError) for answer in answers[1000:])
    assert len(service.requests) == 2


def test_an_error_before_anything_was_accepted_is_raised(service: RecordedService, do: Do) -> None:
    service.reply_with(a_problem(401, "unauthenticated"))
    with pytest.raises(Refused):
        do("submit_many", [{"run": {}}])


def test_a_busy_service_is_retried_with_the_same_key(service: RecordedService, do: Do) -> None:
    service.reply_with(a_problem(429, "too-many-requests"), answered(*accepted("task_1")))
    assert list(do("submit_many", [{"run": {}}])) == ["task_1"]
    assert len({request.headers["idempotency-key"] for request in service.requests}) == 1


@pytest.mark.parametrize("wrong", [{"run": {1, 2}}, {"run": float("nan")}])
def test_a_task_that_is_not_json_is_refused_before_anything_is_sent(do: Do, wrong: Any) -> None:
    with pytest.raises(WrongArgument):
        do("submit_many", [wrong])


def test_a_submission_has_no_key_of_its_own() -> None:
    with pytest.raises(WrongArgument, match="submit_many"):
        Submission("a:b", idempotency_key="k")


# The command line


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "tasks.jsonl"
    lines = [json.dumps({"run": {"entrypoint": "a:b", "args": [n]}}) for n in range(3)]
    path.write_text(f"{lines[0]}\n\n{lines[1]}\n{lines[2]}\n", encoding="utf-8")
    return str(path)


def test_submit_batch_prints_the_ids(service: RecordedService, run: Run, file: str) -> None:
    service.reply_with(answered(*accepted("task_1", "task_2", "task_3")))
    ended = run("submit --batch", file)
    assert (ended.code, ended.out) == (0, "task_1\ntask_2\ntask_3\n")
    assert "3 accepted, 0 refused" in ended.err
    assert [task["run"]["args"] for task in service.requests[0].body["tasks"]] == [[0], [1], [2]]


def test_refused_tasks_are_a_table_of_reasons_and_line_numbers(
    service: RecordedService, run: Run, file: str
) -> None:
    service.reply_with(
        answered(
            refused("/tasks/0/nmae"),
            *accepted("task_2"),
            refused("/tasks/2/resources/gpu_mb", "exceeds-capacity"),
        )
    )
    ended = run("submit --batch", file)
    assert (ended.code, ended.out) == (6, "task_2\n")
    table = [line.split() for line in ended.err.splitlines()]
    assert table[0] == ["LINES", "CODE", "WHERE", "WHY"]
    assert table[1][:3] == ["1", "validation-failed", "/nmae"]
    assert table[2][:3] == ["4", "exceeds-capacity", "/resources/gpu_mb"]
    assert "1 accepted, 2 refused" in ended.err


def test_lines_with_the_same_reason_share_a_row(service: RecordedService, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"run": {}}\n' * 4, encoding="utf-8")
    service.reply_with(
        answered(*(refused(f"/tasks/{n}/run") for n in (0, 1)), *accepted("t"), refused("/tasks/3/run"))
    )
    assert "1-2, 4" in run("submit --batch", str(path)).err.splitlines()[1]


def test_submit_batch_reads_standard_input_and_prints_json(
    service: RecordedService, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"run": {}}\n{"run": {}}\n'))
    service.reply_with(answered(*accepted("task_1"), refused("/tasks/1/run")))
    ended = run("submit --batch - -o ndjson --all-or-nothing --idempotency-key k")
    first, second = map(json.loads, ended.out.splitlines())
    assert first == {"line": 1, "id": "task_1"}
    assert (second["line"], second["code"]) == (2, "validation-failed")
    assert service.requests[0].body["all_or_nothing"] is True


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("submit a:b --batch FILE", "--batch only goes with"),
        ("submit --gpus 1 --batch FILE", "--batch only goes with"),
        ("submit --batch FILE -- true", "--batch only goes with"),
        ("submit --batch nowhere.jsonl", "cannot read nowhere.jsonl"),
    ],
)
def test_options_that_do_not_go_with_batch_are_refused(
    service: RecordedService, run: Run, file: str, words: str, expected: str
) -> None:
    ended = run(words.replace("FILE", file))
    assert ended.code == 2
    assert expected in " ".join(ended.err.split())
    assert service.requests == []


def test_a_line_that_is_not_json_is_named_and_nothing_is_sent(
    service: RecordedService, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"run": {}}\nrun: x\n', encoding="utf-8")
    ended = run("submit --batch", str(path))
    assert ended.code == 2
    assert "line 2" in ended.err
    assert service.requests == []


def test_tasks_that_run_after_others_of_the_list_are_sent_in_one_request(
    service: RecordedService, do: Do
) -> None:
    items = [{"status": 202, "id": f"task_{n}"} for n in range(1500)]
    service.reply_with(Reply(207, {"items": items}))
    tasks = [Submission("a:b"), *(Submission("a:b", after=[0]) for _ in range(1499))]
    assert len(do("submit_many", tasks)) == 1500
    assert len(service.requests) == 1
    service.reply_with(Reply(207, {"items": items[:1000]}), Reply(207, {"items": items[:500]}))
    do("submit_many", [Submission("a:b", after=["task_7"])] * 1500)
    assert len(service.requests) == 3, "an id refers to no task of the list"
    with pytest.raises(WrongArgument, match="in one request, of at most 10000"):
        do("submit_many", [{"run": {}, "after": ["prepare"]}] * 10_001)
