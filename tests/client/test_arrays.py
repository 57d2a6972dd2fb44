"""Arrays through SDK and command line."""

import base64
import itertools
import json
from inspect import signature
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from gpubroker import AsyncBroker, Broker, BrokerError, ItemFailed, WrongArgument
from gpubroker.cli.tasks.arrays import map_
from gpubroker.cli.tasks.submit import submit as submit_command
from gpubroker.tasks.array_api import ArrayItem, bar_line, progress_bar
from gpubroker.transport.decoding import decode
from gpubroker.wire.arrays import Array, ArrayState

from tests.client.command_line import Run
from tests.client.conftest import Do
from tests.client.recorded_service import RecordedService, Reply

ID = "task_01j00000000000000000000000"
NO_NODE_HERE = Reply(200, {"items": []})
"""What a command asks first: the node on this machine, in whose directory it would run."""


def array(done: int = 0, total: int = 3, state: str = "running", **fields: Any) -> Reply:
    about = {"id": ID, "name": "", "tenant": "default", "workers": [{"id": ID, "state": "running"}]}
    counts = {"total": total, "done": done, "failed": 0, "fraction": done / total, "items_per_second": 2.0}
    return Reply(200, {**about, **counts, "state": state, **fields})


def page(*items: dict[str, Any], after: int, more: bool = False) -> Reply:
    return Reply(200, {"items": list(items), "next_after": after, "has_more": more})


def item(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "number": number,
        "state": "succeeded",
        "seconds": 0.1,
        "tries": 1,
        "result": number * 10,
        **fields,
    }


def bad(number: int) -> dict[str, Any]:
    error = {"kind": "exception", "message": "ValueError: no", "traceback": "trace"}
    return {"number": number, "state": "failed", "seconds": 0.1, "tries": 1, "error": error}


def test_a_map_gives_results_in_the_order_of_the_items(do: Do, service: RecordedService) -> None:
    service.reply_with(
        array(),
        page(item(1), after=1),
        *(page(after=1), array(1)),
        page(item(0), item(2), after=2),
    )
    options: dict[str, Any] = {"max_parallel": 2, "item_retries": 1, "gpu_mb": 100}
    assert do("map", "jobs:f", ["a", "b", "c"], 7, **options) == [0, 10, 20]
    sent, *others = service.requests
    assert (sent.method, sent.path) == ("POST", "/arrays")
    assert sent.headers["idempotency-key"]
    assert sent.body == {
        "run": {"entrypoint": "jobs:f", "args": [7], "kwargs": {}},
        "resources": {"gpu_mb": 100},
        "items": ["a", "b", "c"],
        "max_parallel": 2,
        "item_retries": 1,
    }
    asked = [dict(request.params) for request in others if request.path.endswith("/items")]
    assert [(params["order"], params.get("after")) for params in asked] == [
        ("completed", None), ("completed", "1"), ("completed", "1"),
    ]  # fmt: skip


def test_a_map_may_give_them_as_they_come(do: Do, service: RecordedService) -> None:
    service.reply_with(array(), page(item(2), item(0), item(1), after=1))
    assert do("map", "jobs:f", [1, 2, 3], ordered=False) == [20, 0, 10]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_failed_item_raises_in_its_place(service: RecordedService, ordered: bool) -> None:
    """After the results before it, which came in the same answer."""
    service.reply_with(array(), page(item(0), item(1), bad(2), after=1))
    with Broker(service.url, "gpb_secret") as broker:
        found = broker.map("jobs:f", [1, 2, 3], ordered=ordered)
        assert [next(found), next(found)] == [0, 10]
        with pytest.raises(
            ItemFailed, match=rf"item 2 of array {ID} failed \(exception\): ValueError: no"
        ) as it:
            next(found)
    assert (it.value.number, it.value.kind, it.value.traceback) == (2, "exception", "trace")
    assert it.value.array == ID


def test_a_failed_item_may_be_its_exception(do: Do, service: RecordedService) -> None:
    service.reply_with(array(), page(item(0), bad(1), item(2), after=1))
    zero, one, two = do("map", "jobs:f", [1, 2, 3], return_exceptions=True)
    assert (zero, one.number, two) == (0, 1, 20)


def test_an_item_whose_result_cannot_be_opened_is_named(do: Do, service: RecordedService) -> None:
    foreign = item(1, data_base64=base64.b64encode(b"cno_such_module\nThing\n.").decode())
    service.reply_with(array(total=2), page(item(0), foreign, after=1))
    zero, one = do("map", len, [1, 2], return_exceptions=True)
    assert (zero, one.number, one.source) == (0, 1, ID)
    assert f"the result of item 1 of {ID} cannot be opened here (ModuleNotFoundError: No module" in str(one)


def test_a_map_that_ends_with_items_left_says_so(do: Do, service: RecordedService) -> None:
    service.reply_with(array(), page(item(1), after=1))
    service.reply_with(page(after=1), array(1, state="cancelled"), page(after=1))
    with pytest.raises(BrokerError, match="cancelled with 2 items left"):
        do("map", "jobs:f", [1, 2, 3])


def test_a_map_of_no_items_yields_nothing_and_asks_nothing(do: Do, service: RecordedService) -> None:
    assert do("map", "jobs:f", []) == do("map", len, iter(())) == []
    assert service.requests == []


def test_an_endless_iterator_is_refused_with_the_limit(
    do: Do, service: RecordedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpubroker.tasks.array_api.MAX_ITEMS", 1000)
    numbers = itertools.count()
    for name in ("map", "submit_array"):
        with pytest.raises(WrongArgument, match="at most 1000 items, and there are more"):
            do(name, "jobs:f", numbers)
    assert (next(numbers), service.requests) == (2002, [])


def ends_of(service: RecordedService) -> list[str]:
    return [request.path for request in service.requests if request.path.endswith("/cancel")]


@pytest.mark.parametrize(("keep", "cancels"), [(False, 1), (True, 0)])
def test_leaving_a_map_cancels_its_array_unless_kept(
    service: RecordedService, keep: bool, cancels: int
) -> None:
    service.reply_with(array(), page(item(0), after=1), array(state="cancelled"))
    with Broker(service.url, "gpb_secret") as broker:
        for value in broker.map("jobs:f", [1, 2, 3], keep=keep):
            assert value == 0
            break
        assert ends_of(service) == [f"/arrays/{ID}/cancel"] * cancels


async def test_an_async_map_that_is_closed_cancels_its_array(service: RecordedService) -> None:
    service.reply_with(array(), page(item(0), after=1), array(state="cancelled"))
    async with AsyncBroker(service.url, "gpb_secret") as broker:
        results: Any = broker.map("jobs:f", [1, 2, 3])
        assert await anext(results) == 0
        await results.aclose()
    assert ends_of(service) == [f"/arrays/{ID}/cancel"]


def test_a_map_cancels_the_rest_when_an_item_raises(do: Do, service: RecordedService) -> None:
    service.reply_with(array(), page(bad(0), after=1), array(state="cancelled"))
    with pytest.raises(ItemFailed):
        do("map", "jobs:f", [1, 2, 3])
    assert ends_of(service) == [f"/arrays/{ID}/cancel"]


def test_a_map_that_came_to_its_end_is_not_cancelled(do: Do, service: RecordedService) -> None:
    service.reply_with(array(), page(item(0), item(1), item(2), after=2))
    assert do("map", "jobs:f", [1, 2, 3]) == [0, 10, 20]
    assert ends_of(service) == []


def test_functions_and_their_items_are_pickled_and_results_unpickled(
    do: Do, service: RecordedService
) -> None:
    packed = base64.b64encode(cloudpickle.dumps({4})).decode()
    service.reply_with(
        array(total=1),
        page({"number": 0, "state": "succeeded", "data_base64": packed}, after=1),
    )  # fmt: skip
    assert do("map", lambda x: x, [{1}]) == [{4}]
    body = service.requests[0].body
    assert cloudpickle.loads(base64.b64decode(body["items"]["pickled"])) == [{1}]
    assert (body["items"]["count"], body["result_format"]) == (1, "cloudpickle")


def test_large_items_are_uploaded_first(
    do: Do, service: RecordedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpubroker.tasks.array_api._INLINE_BYTES", 2)
    service.reply_with(Reply(201, {"id": "ab" * 32}), array(), array(), page(after=0))
    seen = do("submit_array", ["convert", "{}"], ["a", "b"])
    assert (seen.id, seen.state) == (ID, ArrayState.RUNNING)
    upload, sent = service.requests
    assert (upload.path, upload.body) == ("/objects", b'["a","b"]')
    assert sent.body["items"] == {"object": "ab" * 32, "count": 2}


def test_wrong_items_are_refused_before_anything_is_sent(do: Do, service: RecordedService) -> None:
    for items in ([], [{1}]):
        with pytest.raises(WrongArgument):
            do("submit_array", "jobs:f", items)
    with pytest.raises(WrongArgument, match="pickled"):
        do("submit_array", len, [__import__("threading").Lock()])
    assert service.requests == []


def test_the_other_operations_of_an_array(do: Do, service: RecordedService) -> None:
    service.reply_with(array(), array(state="cancelled"), array(retry_of=ID))
    assert do("array", ID).workers[0].state == "running"
    assert do("cancel_array", ID).is_finished
    assert do("retry_array", ID, idempotency_key="k").retry_of == ID
    assert [(one.method, one.path.removeprefix(f"/arrays/{ID}")) for one in service.requests] == [
        ("GET", ""), ("POST", "/cancel"), ("POST", "/retry"),
    ]  # fmt: skip
    service.reply_with(page(item(0), after=0, more=True), page(bad(1), after=1))
    first, second = do("array_items", ID, state="failed")
    assert (first.value, second.number) == (0, 1)
    service.reply_with(array(), array(), array(1), array(3, state="succeeded"))
    assert [seen.done for seen in do("array_progress", ID)] == [0, 1, 3]


def test_a_newer_state_is_unknown() -> None:
    assert ArrayState("dreaming") is ArrayState.UNKNOWN


def test_an_item_has_none_of_what_its_answer_leaves_out() -> None:
    item = decode(ArrayItem, {"number": 3})
    assert (item.number, item.state, item.result, item.data, item.error, item.failed) == (
        3, "", None, None, None, None,
    )  # fmt: skip


def test_a_bar_says_how_far_an_array_is(capsys: pytest.CaptureFixture[str]) -> None:
    half = decode(Array, {"id": ID, "state": "running", "total": 4, "done": 2, "failed": 1, "fraction": 0.5})
    assert bar_line(half, 4) == "[##..] 2/4, 1 failed"
    show = progress_bar()
    show(half)
    show(half)
    assert capsys.readouterr().err.count("2/4") == 1


def test_the_command_prints_results_in_order_and_failures_apart(
    service: RecordedService, run: Run, tmp_path: Path
) -> None:
    lines = tmp_path / "items"
    lines.write_text('{"a": 1}\n\ntwo words\n3\n')
    service.reply_with(array(), array(3, state="failed", failed=1), page(item(0), bad(1), item(2), after=2))
    ended = run(f"map jobs:f --items {lines} -j 2 --item-timeout 5s --chunk 9 -i by=2")
    assert ended.code == 3
    assert ended.out.split() == ["0", "20"]
    assert "item 1: exception: ValueError: no" in ended.err
    assert f"1 of 3 items failed; again: gpubroker array {ID} --retry" in ended.err
    assert service.requests[0].body == {
        "run": {"entrypoint": "jobs:f", "args": [], "kwargs": {"by": 2}},
        "items": [{"a": 1}, "two words", 3],
        "chunk": 9,
        "max_parallel": 2,
        "item_timeout_seconds": 5.0,
    }


def test_the_command_maps_a_command_and_need_not_wait(
    service: RecordedService, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "items").write_text("a\nb\n")
    service.reply_with(NO_NODE_HERE, array())
    ended = run(f"map --detach --items {tmp_path / 'items'} -- convert {{}} --small")
    assert (ended.code, ended.out.strip()) == (0, ID)
    assert service.requests[-1].body["run"] == {"command": ["convert", "{}", "--small"]}


def test_items_of_a_command_are_the_lines_of_the_file(
    service: RecordedService, run: Run, tmp_path: Path
) -> None:
    """They name files and versions: what looks like JSON stays as it is written."""
    lines = ["1.10", "1e5", "007", '"quoted"', '{"a":1}', "NaN", "a\u2028b"]
    (tmp_path / "items").write_bytes("\r\n".join(lines).encode())
    service.reply_with(NO_NODE_HERE, array())
    assert run(f"map -d --items {tmp_path / 'items'} -- convert").code == 0
    assert service.requests[-1].body["items"] == lines
    service.reply_with(array())
    assert run(f"map jobs:f -d --items {tmp_path / 'items'}").code == 0
    assert service.requests[-1].body["items"] == [1.1, 1e5, "007", "quoted", {"a": 1}, "NaN", "a\u2028b"]
    (tmp_path / "items").write_bytes(b"a\xff\n")
    refused = run(f"map jobs:f --items {tmp_path / 'items'}")
    assert (refused.code, "is not UTF-8: byte 1 is 0xff" in refused.err) == (2, True)


def test_the_command_takes_the_options_of_a_task_for_its_workers(
    service: RecordedService, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "items").write_text("1\n")
    service.reply_with(array())
    options = (
        "--profile verifier --pool p --model-type m --gpu-fraction 0.5 --custom fpga=2 --placement spread "
        "--prefer-kind H100 -C / --grace 5s --idempotency-key k --timeout 1h --stream s --hold --after " + ID
    )
    assert run(f"map -d --items {tmp_path / 'items'} {options} -- convert").code == 0
    sent = service.requests[0]
    assert sent.headers["idempotency-key"] == '"k"'
    body = sent.body
    assert body["resources"] == {
        "pool": "p", "gpu_fraction": 0.5, "custom": {"fpga": 2.0}, "prefer_kinds": ["H100"],
    }  # fmt: skip
    given = {"profile": "verifier", "model_type": "m", "grace_seconds": 5.0}
    given |= {"timeout_seconds": 3600.0, "stream": "s", "held": True, "after": [ID], "placement": "spread"}
    assert {name: body.get(name) for name in given} == given
    assert body["run"] == {"command": ["convert"], "working_directory": "/"}
    assert {*signature(submit_command).parameters} - {*signature(map_).parameters} == {
        "bundles", "strategy", "min_ranks", "max_retries", "wait", "follow", "wait_timeout", "dry_run",
        "batch", "all_or_nothing", "ray", "ray_dashboard",
    }  # fmt: skip


def test_last_is_the_array_that_was_last_submitted_from_here(
    service: RecordedService, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "items").write_text("1\n")
    service.reply_with(array(), array(1), array(state="cancelled"))
    run(f"map jobs:f -d --items {tmp_path / 'items'}")
    assert "1/3" in run("array last").out
    assert run("array last --cancel").code == 0
    assert [one.path for one in service.requests[1:]] == [f"/arrays/{ID}", f"/arrays/{ID}/cancel"]


def test_the_command_about_an_array(service: RecordedService, run: Run) -> None:
    service.reply_with(array(1))
    assert "1/3" in run(f"array {ID}").out
    service.reply_with(page(item(0), bad(1), after=1))
    shown = run(f"array {ID} --items -o ndjson").out.splitlines()
    assert [json.loads(line)["number"] for line in shown] == [0, 1]
    service.reply_with(array(1, state="cancelled"))
    assert "cancelled" in run(f"array {ID} --cancel").out
    service.reply_with(array(), array(1, state="cancelled"), page(item(0), after=1))
    waited = run(f"array {ID} --retry --wait -o ndjson")
    assert (waited.code, "2 of 3 items were left" in waited.err) == (4, True)
    service.reply_with(array(3, state="succeeded"), array(3, state="succeeded"), page(item(0), after=1))
    assert run(f"array {ID} --wait").code == 0
    assert run(f"array {ID} --items --cancel").code == 2
    assert run("map jobs:f --items /no/such/file").code == 2


def test_logs_and_stack_pass_on_which_worker_is_meant(service: RecordedService, run: Run) -> None:
    stack = {"id": "task_2", "attempt": 1, "rank": 0, "node": "n1", "stack": "Thread 1", "message": ""}
    service.reply_with(Reply(200, b"one\n"), Reply(200, stack))
    assert run(f"logs {ID} --stream stdout --worker task_2").out == "one\n"
    assert run(f"stack {ID} --worker task_2").out == "Thread 1\n"
    assert [dict(request.params)["worker"] for request in service.requests] == ["task_2", "task_2"]
