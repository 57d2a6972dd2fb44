"""Questions to a Triton server: whether it answers, and which models it has."""

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import msgspec

from gpubroker_server.core.domain.model_orders import IndexedModel, ModelState
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.inference.servers import Endpoint, Server
from gpubroker_server.ports.backends import (
    UNAUTHORIZED_STATUSES,
    CallFailed,
    NotFetched,
    RequestHead,
    Trouble,
)

_LIVE_CALL: Final = "/inference.GRPCInferenceService/ServerLive"
_LIVE: Final = RequestHead(b"GET", b"/v2/health/live", (), 0)
_INDEX: Final = RequestHead(b"POST", b"/v2/repository/index", (), 0)

_STAGE_OF_STATE: Final = {
    "READY": ModelState.READY,
    "UNLOADING": ModelState.UNLOADING,
    "LOADING": ModelState.LOADING,
}
_STAGE_ORDER: Final = (ModelState.READY, ModelState.UNLOADING, ModelState.LOADING, ModelState.ABSENT)
"""Stages in the order in which they count: the stage of a model is the first of these that one of its
versions has."""


class TritonChecks:
    async def check(self, server: Server, endpoint: Endpoint, within_seconds: Seconds) -> None:
        """Check that the server says that it is live. Raises NotFetched."""
        if endpoint is server.grpc:
            await _call(server, within_seconds)
            return
        answer = await server.backend.fetch(_LIVE, within_seconds=within_seconds, is_check=True)
        if answer.status in UNAUTHORIZED_STATUSES:
            server.http.refused(f"it answered GET /v2/health/live with {answer.status}")
        if answer.status != 200:
            raise NotFetched(Trouble.BROKEN, f"GET /v2/health/live was answered {answer.status}")

    async def index(self, server: Server, within_seconds: Seconds) -> Mapping[str, IndexedModel] | None:
        """Return the models of the server's repository, or None if the answer is no index. Raises
        NotFetched."""
        answer = await server.backend.fetch(_INDEX, within_seconds=within_seconds, is_check=True)
        if answer.status in UNAUTHORIZED_STATUSES:
            server.http.refused(f"it answered POST /v2/repository/index with {answer.status}")
        return models_in(answer.body) if answer.status == 200 else None

    async def change(self, server: Server, model: str, *, loads: bool, within_seconds: Seconds) -> str:
        """Have the server load or unload the model. Returns the server's error message; empty if it did so.
        Raises NotFetched."""
        what = "load" if loads else "unload"
        path = f"/v2/repository/models/{quote(model, safe='')}/{what}".encode()
        answer = await server.backend.fetch(RequestHead(b"POST", path, (), 0), within_seconds=within_seconds)
        if answer.status in UNAUTHORIZED_STATUSES:
            why = f"it answered {answer.status}"
            server.http.refused(why)
            raise NotFetched(Trouble.UNAUTHORIZED, why)
        return "" if answer.status == 200 else _error_in(answer.body) or f"it answered {answer.status}"


def _error_in(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body, type=dict[str, Any]).get("error", ""))[:2000]
    except msgspec.DecodeError:
        return ""


async def _call(server: Server, within_seconds: Seconds) -> None:
    """Check that the server answers over gRPC. Raises NotFetched."""
    assert server.calls is not None
    try:
        await server.calls.ask(_LIVE_CALL, b"", (), within_seconds)
    except CallFailed as failed:
        raise NotFetched(failed.trouble or Trouble.BROKEN, failed.detail) from None


def models_in(index: bytes) -> dict[str, IndexedModel] | None:
    """Return the models in an answer to `POST /v2/repository/index`, which has a row for each version of a
    model. Returns None if the answer is something else."""
    try:
        rows = msgspec.json.decode(index, type=list[dict[str, str]])
    except msgspec.DecodeError:
        return None
    return _by_model(rows)


def _by_model(rows: Sequence[Mapping[str, str]]) -> dict[str, IndexedModel]:
    models: dict[str, IndexedModel] = {}
    for row in rows:
        name, stage = row.get("name", ""), _STAGE_OF_STATE.get(row.get("state", ""), ModelState.ABSENT)
        indexed = models.get(name, IndexedModel(name, ModelState.ABSENT))
        versions = (row.get("version", ""),) if stage is ModelState.READY else ()
        nearest = min(indexed.stage, stage, key=_STAGE_ORDER.index)
        reason = row.get("reason", "") if nearest is stage else indexed.reason
        models[name] = IndexedModel(name, nearest, (*indexed.versions, *versions), reason)
    return models


TRITON: Final = TritonChecks()
