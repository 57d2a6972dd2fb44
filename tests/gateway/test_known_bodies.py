"""POST /tasks reads a body that is like one before as if it were the first."""

from typing import Any

import pytest
from gpubroker_server.core.admission.submission import Submission
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.gateway.hot.known_bodies import MAX_KNOWN, KnownBodies
from gpubroker_server.gateway.submission.task_body import SubmitTask
from gpubroker_server.gateway.submission.translation import submission_of
from gpubroker_server.http.routing import Call
from pydantic import ValidationError

from tests.gateway.harness import Client, Gateway, a_body, fault, problem

TEXT = b'{"run":{"entrypoint":"a:b","kwargs":{"n":%b}},"labels":{"of":"%b"},"priority":60}'
JSON = {"content-type": "application/json"}


def a_call(tenant: str) -> Call:
    class Sender:
        def __init__(self) -> None:
            self.tenant = tenant

    return Call({"type": "http", "state": {"identity": Sender(), "headers": {}}})


class Reading:
    """A reader, and the texts that had to be read whole."""

    def __init__(self) -> None:
        self.whole: list[bytes] = []
        self._known = KnownBodies(self._read_whole)

    def read(self, text: bytes, tenant: str = "t") -> Submission:
        return self._known.read(a_call(tenant), text)

    def _read_whole(self, _call: Call, text: bytes) -> SubmitTask:
        self.whole.append(text)
        return SubmitTask.model_validate_json(text)


@pytest.mark.parametrize(
    "run",
    [b'{"entrypoint":"a:b"}', b'{"entrypoint":"a:b","args":[1,[2.5,"x"]],"kwargs":{"z":null,"a":true}}'],
)
def test_a_body_like_one_before_is_read_as_the_first_is(run: bytes) -> None:
    reading = Reading()
    for text in (b'{"run":{"entrypoint":"a:b","args":[7]},"name":"x"}', b'{"run":%b,"name":"x"}' % run):
        for tenant in ("one", "two"):
            assert reading.read(text, tenant) == submission_of(SubmitTask.model_validate_json(text), tenant)
    assert len(reading.whole) == 1


def test_bodies_of_several_kinds_are_known_at_once() -> None:
    reading = Reading()
    for n in range(20):
        text = TEXT % (b"%d" % n, b"%d" % (n % 3))
        assert reading.read(text) == submission_of(SubmitTask.model_validate_json(text), "t")
    assert len(reading.whole) == 3


def test_only_so_many_kinds_of_bodies_are_known() -> None:
    reading = Reading()
    for n in [*range(MAX_KNOWN + 1), 0]:
        reading.read(TEXT % (b"1", b"%d" % n))
    assert len(reading.whole) == MAX_KNOWN + 2


@pytest.mark.parametrize(
    "text",
    [
        b'{"run":{"entrypoint":"a:c"}}',
        b'{"run":{"command":["true"]}}',
        b'{"run":{"entrypoint":"a:b","args":[{"object":"%b"}]}}' % (b"0" * 64),
        b'{"run":{"entrypoint":"a:b"},"name":"a:b"}',
    ],
)
def test_a_body_that_is_like_none_before_is_read_whole(text: bytes) -> None:
    reading = Reading()
    reading.read(b'{"run":{"entrypoint":"a:b"}}')
    assert reading.read(text) == submission_of(SubmitTask.model_validate_json(text), "t")
    assert reading.whole[1:] == [text]


@pytest.mark.parametrize("text", [b"\xff", b"[" * 100_000, b'{"run":{"entrypoint":"\xff"}}', b"", b"{}"])
def test_text_that_is_no_task_is_left_to_the_whole_reading(text: bytes) -> None:
    reading = Reading()
    for _ in range(2):
        with pytest.raises(ValidationError):
            reading.read(text)
    assert reading.whole == [text, text]


async def test_tasks_like_one_before_have_their_own_arguments(gateway: Gateway, api: Client) -> None:
    tasks = [await api.submit(a_body()["run"] | {"args": [n]}, name="like") for n in range(3)]
    specs = await gateway.store.specs([TaskId(task) for task in tasks])
    assert [specs[TaskId(task)].arguments for task in tasks] == [
        b'{"args":[%d],"kwargs":{}}' % n for n in range(3)
    ]


@pytest.mark.parametrize(
    ("run", "pointer"),
    [
        (b'{"entrypoint":"a:b","kwargs":{"n":1,"n":2}}', ""),
        (b'{"entrypoint":"a:b","kwargs":{"n":NaN}}', "/run"),
        (b'{"entrypoint":"a:b","wrong":1}', "/run/wrong"),
    ],
)
async def test_what_is_wrong_with_a_body_like_one_before_is_said(
    gateway: Gateway, api: Client, run: bytes, pointer: str
) -> None:
    good: dict[str, Any] = {"content": b'{"run":{"entrypoint":"a:b"}}', "headers": JSON}
    await api.post("/tasks", **good)
    answer = await api.post("/tasks", content=b'{"run":%b}' % run, headers=JSON)
    alone = await gateway.with_secret(None).post("/tasks", content=b"{}")
    assert alone.status_code == 401
    assert fault(answer, pointer)
    problem(await api.post("/tasks", content=good["content"], headers={"content-type": "text/plain"}), 415,
            "unsupported-media-type")  # fmt: skip
