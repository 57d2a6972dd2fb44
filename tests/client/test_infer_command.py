"""`gpubroker infer`, against recorded answers."""

from typing import Any

import pytest

from tests.client.command_line import Run
from tests.client.recorded_service import FULL_ID, RecordedService, Reply, a_task, outcome


def test_infer_asks_a_model_and_prints_its_answer(service: RecordedService, run: Run) -> None:
    answer = {"model_name": "resnet", "outputs": [{"name": "y", "data": [0.9]}]}
    service.reply_with(
        Reply(202, a_task(FULL_ID)),
        Reply(200, a_task(FULL_ID, "succeeded")),
        outcome("succeeded", result=answer),
    )
    ended = run("infer resnet -i image:FP32=[[1,2],[3,4]] -i k=5 --priority interactive --only y")
    assert (ended.code, ended.json) == (0, answer)
    sent = service.requests[0].body
    assert sent["inputs"] == [
        {"name": "image", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]},
        {"name": "k", "datatype": "INT64", "shape": [1], "data": [5]},
    ]
    assert (sent["model"], sent["priority"], sent["outputs"]) == ("resnet", "interactive", [{"name": "y"}])


def test_infer_later_prints_the_id(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(202, a_task(FULL_ID)))
    assert run("infer llm -i", "prompt=write a poem", "--later").out == f"{FULL_ID}\n"
    assert service.requests[0].body["inputs"] == [
        {"name": "prompt", "datatype": "BYTES", "shape": [1], "data": ["write a poem"]}
    ]


@pytest.mark.parametrize(
    ("given", "tensor"),
    [
        ("x=[true,false]", ("BOOL", [2], [True, False])),
        ("x=[[0.5,1]]", ("FP32", [1, 2], [0.5, 1])),
        ('x=["a","b"]', ("BYTES", [2], ["a", "b"])),
        ("x:int8=[]", ("INT8", [0], [])),
    ],
)
def test_the_datatype_follows_from_the_values(
    service: RecordedService, run: Run, given: str, tensor: Any
) -> None:
    service.reply_with(Reply(202, a_task(FULL_ID)))
    assert run("infer m --later -i", given).code == 0
    [sent] = service.requests[0].body["inputs"]
    assert (sent["datatype"], sent["shape"], sent["data"]) == tensor


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("x=[[1],[2,3]]", "differ in length"),
        ("x=[1,[2]]", "all of one kind; found lists, numbers"),
        ('x=[1,"a"]', "all of one kind; found numbers, texts"),
        ("x=[]", "found none"),
        ("x", "write NAME=VALUE"),
    ],
)
def test_an_input_that_is_no_tensor_is_refused(
    service: RecordedService, run: Run, given: str, says: str
) -> None:
    ended = run("infer m -i", given)
    assert ended.code == 2
    assert says in " ".join(ended.err.replace("│", " ").split())
    assert service.requests == []
