"""A model server that does not accept the service's credentials: the client is told that it is not about its
own token, and the operator until it is over."""

import json

import grpc
import pytest

from tests.gateway import call_stage
from tests.gateway.harness import Gateway
from tests.gateway.inference_stage import INFER, Heard, a_stage


def an_answer(status: int) -> bytes:
    body = b'{"error":"This API is restricted"}'
    return b"HTTP/1.1 %d Nope\r\nWWW-Authenticate: Basic\r\nContent-Length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )


async def findings(gateway: Gateway) -> list[tuple[str, str, str]]:
    found = (await gateway.admin.get("/diagnostics")).json()["items"]
    return [(one["kind"], one["subject"], one["severity"]) for one in found]


@pytest.mark.provokes("model-server-unauthorized")
@pytest.mark.parametrize("status", [401, 403, 407])
async def test_a_refusal_of_the_service_is_no_word_about_the_client(status: int) -> None:
    async with a_stage(heard := Heard(an_answer(status))) as stage:
        stage.gateway.change(servers=list(stage.fleet.servers))
        stage.gateway.admin = await stage.gateway.client("boss")
        for path in (INFER, "/v2/models/any/config"):
            answered, headers, body = await stage.ask("POST", path, b"{}")
            told = json.loads(body)
            assert (answered, told["code"]) == (502, "model-server-unauthorized")
            assert "www-authenticate" not in headers
            assert "model server main does not accept the service's own credentials" in told["error"]
            assert f"(it answered {status})" in told["error"]
        expected = ("model-server-unauthorized", "main (http)", "critical")
        assert expected in await findings(stage.gateway)
        heard.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
        await stage.ask("GET", "/v2/health/ready")
        assert expected in await findings(stage.gateway), "what needs no credentials says nothing"
        assert (await stage.ask("POST", INFER, b"{}"))[0] == 200
        assert expected not in await findings(stage.gateway)


async def test_a_request_goes_to_another_server_when_one_refuses_the_service() -> None:
    refuses, takes = Heard(an_answer(401)), Heard()
    async with a_stage(refuses, others=[takes]) as stage:
        answered = [(await stage.ask("POST", INFER, b"{}"))[0] for _ in range(3)]
        assert answered == [200, 200, 200]
        assert len(takes.bodies) == 3


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED])
async def test_a_refusal_over_grpc_is_no_word_about_the_client(code: grpc.StatusCode) -> None:
    async def refuses(_stream: object, context: grpc.aio.ServicerContext) -> None:
        await context.abort(code, "who are you?")

    async with call_stage.a_stage(refuses) as stage:
        for method in (call_stage.INFER, call_stage.STREAM):
            error = await stage.refusal(method)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert dict(error.trailing_metadata())["code"] == "model-server-unauthorized"
            assert f"it answered {code.name}: who are you?" in str(error.details())
