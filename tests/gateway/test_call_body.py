"""The body of a request is read whole, in however many messages it arrives."""

from typing import Any

import pytest
from gpubroker_server.http.routing import Call
from starlette.requests import ClientDisconnect


def a_call(*messages: dict[str, Any]) -> Call:
    left = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(left)

    return Call({"type": "http", "method": "POST", "path": "/tasks", "headers": []}, receive)


def a_part(body: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_body_in_several_messages_is_joined() -> None:
    call = a_call(a_part(b"[1,", more=True), a_part(b"2,", more=True), a_part(b"3]", more=False))
    assert await call.body() == b"[1,2,3]"
    assert await call.body() == b"[1,2,3]", "it is kept"


async def test_a_client_that_disconnects_in_the_middle_of_a_body_is_noticed() -> None:
    call = a_call(a_part(b"[1,", more=True), {"type": "http.disconnect"})
    with pytest.raises(ClientDisconnect):
        await call.body()
