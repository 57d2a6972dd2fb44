"""A load or an unload by Triton's own protocol leaves a note in the audit log before anything is sent."""

import pytest
from gpubroker_server.ports.store import StoreUnavailable

from tests.gateway import call_stage
from tests.gateway.harness import Gateway
from tests.gateway.inference_stage import Heard, a_stage
from tests.gateway.protobuf import field
from tests.gateway.test_cold_calls import LOAD, UNLOAD
from tests.gateway.test_exchange_refusals import refused

PATH = "/v2/repository/models/any/"


def notes(gateway: Gateway) -> list[tuple[str, str, str, str]]:
    return [(note.actor, note.tenant, note.action, note.subject) for note in gateway.store.audited()]


async def test_a_load_and_an_unload_over_http_are_noted_and_an_inference_is_not() -> None:
    async with a_stage(heard := Heard()) as stage:
        for path in (PATH + "load", PATH + "unload", "/v2/models/any/infer"):
            assert (await stage.ask("POST", path, b"{}"))[0] == 200
        assert notes(stage.gateway) == [
            ("me", "default", "model.load", "any"),
            ("me", "default", "model.unload", "any"),
        ]
    assert len(heard.bodies) == 3


async def test_a_load_and_an_unload_over_grpc_are_noted() -> None:
    async with call_stage.a_stage(call_stage.Heard()) as stage:
        for method in (LOAD, UNLOAD, call_stage.INFER):
            await stage.ask(method, field(2, "any"))
        assert [note[2:] for note in notes(stage.gateway)] == [("model.load", "any"), ("model.unload", "any")]


async def test_what_a_token_may_not_load_is_not_noted() -> None:
    async with a_stage(Heard()) as stage:
        token = await stage.token("models:infer")
        refused(await stage.ask("POST", PATH + "load", b"{}", Authorization=token), 403, "forbidden")
        assert notes(stage.gateway) == []


async def test_a_load_that_cannot_be_noted_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(**_note: str) -> None:
        raise StoreUnavailable

    async with a_stage(heard := Heard()) as stage:
        monkeypatch.setattr(stage.gateway.store, "audit", fails)
        refused(await stage.ask("POST", PATH + "load", b"{}"), 503, "store-unavailable")
    assert heard.bodies == []
