"""Routes of work streams: their weights and signals, and draws among them."""

import secrets
from collections.abc import Mapping
from random import Random
from typing import Annotated, Self

from fastapi import Response
from gpubroker.wire.answered import Overview, Time
from gpubroker.wire.streams import DrawnStream, WorkStream
from msgspec.structs import replace
from pydantic import Field, model_validator

from gpubroker_server.core.control.streams import Draw, drawn, draws
from gpubroker_server.core.domain.decisions import StreamState, known_streams
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.known_names import unknown_stream
from gpubroker_server.http.bodies import NAME, PATTERNS_IN_WORDS, Because, Body, JsonBody, is_name
from gpubroker_server.http.faults import invalid
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.problems import Fault, Problem
from gpubroker_server.http.routing import STORED, Caller, Resource, answer
from gpubroker_server.http.times import GivenTime

resource = Resource("cluster")

LARGEST = 1e12
"""The largest absolute value of progress. It is far beyond every score, and a float holds it."""

SEEDS = 2**53
"""The upper bound of seeds. Every client represents whole numbers below it exactly."""


class PutStream(Body):
    curriculum: Annotated[float, Field(ge=1e-6, le=1e6, description="Its weight, before what signals say.")]
    reason: Because = ""


class TellSignal(Body):
    """New signals of a stream; give at least one."""

    progress: Annotated[
        float, Field(ge=-LARGEST, le=LARGEST, description="Elo, a score: more is better.")
    ] | (None) = None
    progress_at: (
        Annotated[
            GivenTime,
            Field(description="When it was measured; default: now. Older progress than is known is dropped."),
        ]
        | None
    ) = None
    data_age_seconds: (
        Annotated[float, Field(ge=0, le=1e9, description="The age of the stream's newest data.")] | None
    ) = None
    quality: Annotated[float, Field(ge=0, le=1, description="The quality of the stream's data.")] | None = (
        None
    )

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.progress is None and self.progress_at is not None:
            raise ValueError("progress_at says when progress was measured; give progress too")
        if self.progress is None and self.data_age_seconds is None and self.quality is None:
            raise ValueError("give at least one of progress, data_age_seconds and quality")
        return self


class DrawStream(Body):
    seed: Annotated[int, Field(ge=0, lt=SEEDS, description="Null: one is made, and answered.")] | None = None


_DRAW = DrawStream()
_ERRORS = "malformed-json validation-failed leader-outdated"
_SIGNAL_ERRORS = f"{_ERRORS} not-found"


@resource.route("GET /streams", "streams_list", Scope.TASKS_READ, Overview[WorkStream], "follower-stale")
async def list_streams(parts: Parts) -> Response:
    """List all work streams: the signals of each, its factors, its weight and its probability to be drawn."""
    moment, streams = parts.freshness.moment(), parts.world.streams
    return answer(
        Overview(**moment, items=tuple(_shown(parts, streams, draw) for draw in _draws(parts, streams)))
    )


@resource.route(
    "POST /streams/next", "streams_next", Scope.TASKS_READ, DrawnStream, f"{_SIGNAL_ERRORS} follower-stale"
)
async def draw_stream(parts: Parts, body: JsonBody[DrawStream] = _DRAW) -> Response:
    """Draw a work stream to work on next, by the probabilities of the streams. Nothing is stored."""
    parts.freshness.moment()
    streams = parts.world.streams
    seed = secrets.randbelow(SEEDS) if body.seed is None else body.seed
    number = Random(seed).random()  # noqa: S311  # The number is no secret: the answer has the seed.
    draw = drawn(_draws(parts, streams), number)
    if draw is None:
        raise Problem("not-found", "there is no work stream, or all are paused: see GET /streams")
    return answer(DrawnStream(_shown(parts, streams, draw), seed))


@resource.route("PUT /streams/{name}", "streams_put", Scope.ADMIN, WorkStream, _ERRORS, accepted=STORED)
async def put_stream(caller: Caller, parts: Parts, name: str, body: JsonBody[PutStream]) -> Response:
    """Set the curriculum weight of a work stream, which is created if it does not exist.

    The weight holds for all tenants, replaces the weight in the settings, and outlives restarts of the
    service.
    """
    streams = parts.world.streams
    if not is_name(name) and name not in known_streams(parts.policy.streams, streams):
        raise invalid(Fault(pointer="path:name", detail=PATTERNS_IN_WORDS[NAME], code="bad-name"))
    asked = {"curriculum": body.curriculum, "by": caller.name, "reason": body.reason}
    settled = await parts.requests.ask(name, caller.tenant, "stream", asked)
    state = replace(streams.get(name, StreamState(name)), curriculum=body.curriculum)
    return answer(_named(parts, {**streams, name: state}, name), 200 if settled else 202)


@resource.route(
    "POST /streams/{name}/signals", "streams_signal", Scope.TASKS_WRITE, WorkStream, _SIGNAL_ERRORS,
    accepted=STORED,
)  # fmt: skip
async def signal_stream(caller: Caller, parts: Parts, name: str, body: JsonBody[TellSignal]) -> Response:
    """Report the progress of a work stream, the age of its data, and their quality."""
    await parts.freshness.catch_up()
    _named(parts, parts.world.streams, name)
    asked = body.model_dump()
    asked["progress_at"] = None if body.progress_at is None else body.progress_at.timestamp()
    settled = await parts.requests.ask(name, caller.tenant, "stream_signal", asked)
    return answer(_named(parts, parts.world.streams, name), 200 if settled else 202)


@resource.route(
    "DELETE /streams/{name}", "streams_delete", Scope.ADMIN, None, "not-found leader-outdated",
    accepted=STORED, status_code=204,
)  # fmt: skip
async def delete_stream(caller: Caller, parts: Parts, name: str) -> Response:
    """Delete the weight and the signals of a work stream.

    A stream that is in the settings stays, with the weight that it has there. Tasks that name any other
    stream then have the weight 1.
    """
    await parts.freshness.catch_up()
    _named(parts, parts.world.streams, name)
    asked = {"curriculum": None, "by": caller.name, "reason": ""}
    settled = await parts.requests.ask(name, caller.tenant, "stream", asked)
    return Response(status_code=204 if settled else 202)


def _draws(parts: Parts, told: Mapping[str, StreamState]) -> list[Draw]:
    """Return the probability of each work stream to be drawn, by name. `told` maps a name to what clients
    have told of the stream."""
    policy, pauses = parts.policy, parts.world.queue.pauses
    streams = known_streams(policy.streams, told)
    paused = {name for name in streams if f"stream:{name}" in pauses}
    return draws(streams, parts.clock.now(), policy.stream_rules, paused)


def _named(parts: Parts, told: Mapping[str, StreamState], name: str) -> WorkStream:
    """Return the view of the work stream with this name. Raises Problem not-found if there is none."""
    matching = [draw for draw in _draws(parts, told) if draw.name == name]
    if not matching:
        raise Problem("not-found", unknown_stream(name, parts.world, parts.policy))
    return _shown(parts, told, matching[0])


def _shown(parts: Parts, told: Mapping[str, StreamState], draw: Draw) -> WorkStream:
    state, now = told.get(draw.name, StreamState(draw.name)), parts.clock.now()
    return WorkStream(
        name=draw.name,
        progress=state.progress,
        progress_at=None if state.progress is None else Time.at(state.progress_at),
        velocity_per_hour=state.velocity_per_hour,
        data_age_seconds=None if state.data_at is None else max(0.0, now - state.data_at),
        quality=state.quality,
        factors=draw.factors,
        weight=draw.factors.weight,
        probability=draw.probability,
        paused=f"stream:{draw.name}" in parts.world.queue.pauses,
    )
