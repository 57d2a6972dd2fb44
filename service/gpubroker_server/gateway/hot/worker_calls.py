"""The route that calls a method in a worker of a set."""

import base64
from typing import Annotated, Literal

from fastapi import Response
from gpubroker.wire.worker_sets import CallResult
from pydantic import BeforeValidator, Field, JsonValue, WithJsonSchema
from pydantic_core import to_json

from gpubroker_server.core.domain.units import Seconds, TaskId
from gpubroker_server.gateway.hot.direct_route import DirectRoute
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.submission.task_body import decoded
from gpubroker_server.gateway.workers.call_routing import CallRouter
from gpubroker_server.gateway.workers.routes import find_to_change
from gpubroker_server.gateway.workers.submit import MethodName
from gpubroker_server.http.bodies import Body
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.problems import Problem
from gpubroker_server.http.routing import Call, Resource, app_part, json_answer
from gpubroker_server.ports.worker_calls import WorkerCall

resource = Resource("worker sets", DirectRoute)


class CallWorkers(Body):
    """A call of one method, in one of the workers."""

    method: MethodName
    role: Annotated[
        MethodName | Literal[""], Field(description="A role of `colocate_with`; empty: the set's own.")
    ] = ""
    args: Annotated[list[JsonValue], Field(max_length=10_000)] = Field(default_factory=list)
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    pickled: Annotated[
        bytes | None,
        BeforeValidator(decoded),
        Field(
            description="Instead of args and kwargs: base64 of the cloudpickle of `(args, kwargs)`. The "
            "service never unpickles it; the result is pickled too. Needs the scope `tasks:code`."
        ),
        WithJsonSchema({"type": ["string", "null"], "contentEncoding": "base64"}),
    ] = None
    timeout_seconds: Annotated[float, Field(gt=0, le=86_400, description="Waiting included.")] = 60.0
    routing: Annotated[
        Literal["least_queue", "round_robin"],
        Field(description="`least_queue`: the worker with the fewest calls from this gateway."),
    ] = "least_queue"


_CALL_PROBLEMS = (
    "malformed-json not-found payload-too-large no-ray-driver worker-queue-full "
    "call-failed worker-lost no-worker call-timeout tenant-waits task-already-finished"
)


@resource.route(
    "POST /worker-sets/{set_id}/call", "worker_sets_call", Scope.TASKS_WRITE, CallResult, _CALL_PROBLEMS
)
async def call_worker(
    call: Call,
    parts: Parts,
    router: Annotated[CallRouter, app_part(CallRouter)],
    set_id: str,
    body: CallWorkers,
) -> Response:
    """Call a method in one worker, and wait for its result. Calls are not stored.

    A call is sent once, unless a worker refuses it before it has begun: another worker then gets it.
    """
    workers = parts.world.worker_sets.get(TaskId(set_id))
    if workers is None or workers.tenant != call.identity.tenant:
        workers = await find_to_change(call.identity, parts, set_id, "worker_set.call")
        states = await parts.submissions.store.states(workers.workers)
        if all(stored.state.is_terminal for stored in states.values()):
            detail = f"worker set {workers.id} is over: none of its workers is left; form a new one"
            raise Problem("task-already-finished", detail)
    if body.pickled is None:
        form, arguments = "json", to_json({"args": body.args, "kwargs": body.kwargs})
    else:
        call.identity.require(Scope.TASKS_CODE, "pickled arguments")
        form, arguments = "cloudpickle", body.pickled
    asked = WorkerCall(body.role, body.method, form, arguments)
    run, called = await router.call(workers, asked, Seconds(body.timeout_seconds), body.routing)
    # This is a CallResult. It is joined from bytes so that a large result is not encoded again: the worker
    # wrote the JSON, and base64 needs no escapes.
    about = f'{{"worker":"{run.task}","attempt":{run.fence},"seconds":{called.seconds:.6f},'.encode()
    if form == "json":
        return json_answer(b"".join((about, b'"result":', called.result, b',"data_base64":null}')))
    return json_answer(
        b"".join((about, b'"result":null,"data_base64":"', base64.b64encode(called.result), b'"}'))
    )
