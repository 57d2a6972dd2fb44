"""Whatever anybody sends, the answer is one of those the document declares, and never a mistake of ours."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from tests.gateway.harness import DOCUMENT, Client, Gateway

NUMBERS = st.one_of(
    st.integers(),
    st.integers(-3, 200),
    st.floats(),
    st.sampled_from([10**30, -(10**30), 1e308, float("inf")]),
)
TEXTS = st.one_of(
    st.text(max_size=20), st.sampled_from(["", "\0", "a:b", "myteam.a:b", "1" * 5000, "\U0001f600"])
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)


def objects_of(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with the fields of this schema and some others, each holding anything at all."""
    known = sorted(DOCUMENT["components"]["schemas"][name]["properties"])
    return st.dictionaries(st.one_of(st.sampled_from(known), TEXTS), VALUES, max_size=6)


RUNS = st.one_of(*(objects_of(name) for name in ("Entrypoint", "Command", "Function")), VALUES)
SUBMITS = st.builds(
    lambda body, run, resources: {**body, **run, **resources},
    objects_of("SubmitTask"),
    st.fixed_dictionaries({"run": RUNS}),
    st.fixed_dictionaries({}, optional={"resources": objects_of("Resources")}),
)


def ask(send: Callable[[Client, str], Any]) -> None:
    """Send one request to a fresh gateway that has one task. The client checks the answer."""

    async def once() -> None:
        async with Gateway(settle_seconds=0, wait_seconds=0) as gateway:
            response = await send(gateway.admin, await gateway.admin.submit())
            assert response.status_code < 500, response.text

    asyncio.run(once())


@given(SUBMITS)
@example({"run": {"entrypoint": "myteam.a:b", "kwargs": {"x": float("nan")}}})
@example({"run": {"entrypoint": "myteam.a:b", "args": ["\ud800"]}})
def test_any_object_submitted_is_taken_or_refused(body: dict[str, Any]) -> None:
    ask(lambda api, _task: api.post("/tasks", content=json.dumps(body)))


@given(st.one_of(st.binary(max_size=50), VALUES.map(lambda value: json.dumps(value).encode())))
def test_any_bytes_submitted_are_taken_or_refused(body: bytes) -> None:
    ask(lambda api, _task: api.post("/tasks", content=body))


@given(st.sampled_from(["cancel", "change", "token", "shutdown"]), st.data())
def test_any_other_body_is_taken_or_refused(what: str, data: st.DataObject) -> None:
    method, path, schema = {
        "cancel": ("POST", "/tasks/{task}/cancel", "CancelTask"),
        "change": ("PATCH", "/tasks/{task}", "ChangeTask"),
        "token": ("POST", "/tokens", "CreateToken"),
        "shutdown": ("POST", "/shutdown", "ShutDown"),
    }[what]
    body = json.dumps(data.draw(st.one_of(objects_of(schema), VALUES)))
    ask(lambda api, task: api.request(method, path.format(task=task), content=body))


@given(
    st.sampled_from(["/tasks", "/events", "/tasks/{task}/wait", "/tasks/{task}/events", "/gpus"]),
    st.lists(
        st.tuples(
            st.one_of(
                st.sampled_from(["state", "limit", "cursor", "after", "timeout_seconds", "name", "label.x"]),
                TEXTS,
            ),
            st.one_of(TEXTS, NUMBERS.map(str)),
        ),
        max_size=3,
    ),
)
def test_any_query_is_answered_or_refused(path: str, params: list[Any]) -> None:
    ask(lambda api, task: api.get(path.format(task=task), params=params))


@given(
    st.sampled_from(
        ["Idempotency-Key", "Prefer", "Content-Type", "Authorization", "Host", "Content-Encoding"]
    ),
    st.binary(max_size=30).map(lambda value: value.replace(b"\r", b"").replace(b"\n", b"")),
)
def test_any_header_is_taken_or_refused(name: str, value: bytes) -> None:
    headers = [(name.encode(), value)]
    ask(
        lambda api, _task: api.post(
            "/tasks", content=b'{"run": {"entrypoint": "tools:resize"}}', headers=headers
        )
    )
