"""Every operation of the API once, for the sync and the async broker alike: what to send, what to return."""

import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypedDict, cast
from urllib.parse import quote

from gpubroker.cluster.fleet import Gpu, Node, Stats, Tenant
from gpubroker.cluster.plan import FleetPlan
from gpubroker.cluster.policy import Policy
from gpubroker.cluster.quarantine import Detection, Quarantined, Released
from gpubroker.errors import TaskCancelled, TaskExpired, TaskFailed, WaitTimeout
from gpubroker.models.objects import AnyObject, ObjectUsage, StoredObject, object_body
from gpubroker.models.queued import InferLaterOptions, Inputs, inference_body
from gpubroker.models.requests import InferOptions, about, check_model, infer
from gpubroker.models.served import ServedModel
from gpubroker.tasks.batch import Answered, Wanted, submit_all
from gpubroker.tasks.estimates import Estimate
from gpubroker.tasks.explanation import Explanation, Simulation
from gpubroker.tasks.submission import SubmitOptions, Target, opened, plain, question_body, submission_body
from gpubroker.tasks.task import Event, Failure, Outcome, Page, Task, TaskState, Token
from gpubroker.transport.decoding import filled
from gpubroker.transport.exchange import Answer, Call, Steps, exchange

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_LONG_POLL_SECONDS = 30.0
"""How long one request may wait for a task; the service answers at once when the task ends."""

EVENTS_PER_PAGE = 500
_OBJECTS_PER_PAGE = 500
FOLLOW_PAUSE_SECONDS = 0.5

AnyTask = Task | str
"""A task, or its id."""


class ListOptions(TypedDict, total=False):
    """What `list` narrows by; all given must match."""

    state: Sequence[str] | str
    kind: str
    """entrypoint, command, function, inference, model, or external (a lease of what the broker does not
    start)."""
    min_priority: int
    max_priority: int
    labels: Mapping[str, str]
    name: str
    model_type: str
    stream: str
    after: AnyTask
    """Those that run after this one."""
    submitted_from: datetime
    submitted_before: datetime
    finished_from: datetime
    finished_before: datetime
    limit: int
    """Tasks per page; all pages are fetched as they are used."""


class ChangeOptions(TypedDict, total=False):
    """What `change` takes. What is left out stays; None takes a time away."""

    priority: int | str
    """0 to 100, or the name of a band."""
    held: bool
    """A held task is not planned until it is released (False)."""
    not_before: datetime | str | None
    queue_ttl_seconds: float | None
    """Counted anew, from the change or from `not_before`."""
    deadline_at: datetime | str | None


def id_of(task: AnyTask) -> str:
    return task.id if isinstance(task, Task) else task


class Operations:
    """Generators, one per operation (see `transport.exchange`). Holds nothing but how long to try again."""

    def __init__(self, retry_seconds: float) -> None:
        self._retry_seconds = retry_seconds

    def _send(self, call: Call) -> Steps[Answer]:
        return (yield from exchange(call, self._retry_seconds))

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, **params: Any
    ) -> Steps[Any]:
        """One call whose answer is JSON. Parameters that are None are left out."""
        answer = yield from self._send(Call(method, path, params=_given(params), body=_json(body)))
        return answer.json()

    # Tasks

    def submit(self, target: Target, args: Sequence[Any], options: SubmitOptions) -> Steps[Task]:
        key = options.get("idempotency_key") or uuid.uuid4().hex
        body = submission_body(target, args, options)
        call = Call("POST", "/tasks", body=body, headers={"Idempotency-Key": f'"{key}"'})
        answer = yield from self._send(call)
        return Task.of(answer.json())

    def infer_later(self, model: str, inputs: Inputs, options: InferLaterOptions) -> Steps[Task]:
        key = options.get("idempotency_key") or uuid.uuid4().hex
        body, headers = inference_body(model, inputs, options)
        call = Call("POST", "/inferences", body=body, headers={**headers, "Idempotency-Key": f'"{key}"'})
        answer = yield from self._send(call)
        return Task.of(answer.json())

    def upload(self, data: "bytes | ArrayLike") -> Steps[StoredObject]:
        body, about = object_body(data)
        headers = {"Content-Type": "application/octet-stream"}
        answer = yield from self._send(Call("POST", "/objects", body=body, headers=headers))
        return filled(StoredObject, answer.json(), **about)

    def objects_page(self, cursor: str | None) -> Steps[Page[StoredObject]]:
        raw = yield from self._ask("GET", "/objects", limit=_OBJECTS_PER_PAGE, cursor=cursor)
        return Page(tuple(filled(StoredObject, item) for item in raw["items"]), raw.get("next_cursor"), raw)

    def object_usage(self) -> Steps[ObjectUsage]:
        return filled(ObjectUsage, (yield from self._ask("GET", "/objects", limit=1)))

    def delete_object(self, stored: AnyObject) -> Steps[None]:
        id = stored.id if isinstance(stored, StoredObject) else stored
        yield from self._send(Call("DELETE", f"/objects/{_quoted(id)}", repeatable=False))

    def submit_many(
        self, tasks: Iterable[Wanted], *, all_or_nothing: bool, key: str | None
    ) -> Steps[list[Answered]]:
        return submit_all(tasks, all_or_nothing=all_or_nothing, key=key, retry_seconds=self._retry_seconds)

    def simulate(
        self, target: Target | None, args: Sequence[Any], options: SubmitOptions
    ) -> Steps[Simulation]:
        asked = {name: value for name, value in options.items() if name != "idempotency_key"}
        body = question_body(target, args, cast("SubmitOptions", asked))
        answer = yield from self._send(Call("POST", "/tasks/simulate", body=body))
        return Simulation.of(answer.json())

    def get(self, task: AnyTask) -> Steps[Task]:
        return Task.of((yield from self._ask("GET", _path(task))))

    def wait(self, task: AnyTask, timeout_seconds: float | None) -> Steps[Task]:
        began = time.monotonic()
        while True:
            left = _LONG_POLL_SECONDS
            if timeout_seconds is not None:
                left = min(left, max(0.0, timeout_seconds - (time.monotonic() - began)))
            call = Call(
                "GET",
                f"{_path(task)}/wait",
                params={"timeout_seconds": round(left, 3)},
                patience_seconds=left,
            )
            answer = yield from self._send(call)
            seen = Task.of(answer.json())
            if seen.is_finished:
                return seen
            waited = time.monotonic() - began
            if timeout_seconds is not None and waited >= timeout_seconds:
                raise WaitTimeout(seen.id, str(seen.raw.get("state")), timeout_seconds)

    def outcome(self, task: AnyTask) -> Steps[Outcome]:
        return Outcome.of((yield from self._ask("GET", f"{_path(task)}/result")))

    def result(self, task: AnyTask, timeout_seconds: float | None) -> Steps[Any]:
        yield from self.wait(task, timeout_seconds)
        return value_of((yield from self.outcome(task)))

    def cancel(self, task: AnyTask, grace_seconds: float | None, reason: str | None) -> Steps[Task]:
        body = _given({"grace_seconds": grace_seconds, "reason": reason})
        return Task.of((yield from self._ask("POST", f"{_path(task)}/cancel", body)))

    def change(self, task: AnyTask, wanted: ChangeOptions) -> Steps[Task]:
        body = {name: plain(name, value) for name, value in wanted.items()}
        return Task.of((yield from self._ask("PATCH", _path(task), body)))

    def page(self, cursor: str | None, wanted: ListOptions) -> Steps[Page[Task]]:
        params: dict[str, Any] = dict(wanted)
        if "after" in params:
            params["after"] = id_of(params["after"])
        params |= {name: plain(name, value) for name, value in params.items() if isinstance(value, datetime)}
        params |= {f"label.{key}": value for key, value in (params.pop("labels", None) or {}).items()}
        raw = yield from self._ask("GET", "/tasks", **params, cursor=cursor)
        return Page(tuple(Task.of(item) for item in raw["items"]), raw.get("next_cursor"), raw)

    def explain(self, task: AnyTask) -> Steps[Explanation]:
        return Explanation.of((yield from self._ask("GET", f"{_path(task)}/explain")))

    def events(self, task: AnyTask | None, after: int, limit: int) -> Steps[Page[Event]]:
        path = "/events" if task is None else f"{_path(task)}/events"
        raw = yield from self._ask("GET", path, after=after, limit=limit)
        return Page(tuple(Event.of(item) for item in raw["items"]), raw.get("next_after"), raw)

    def estimates(self, subject: str | None) -> Steps[Page[Estimate]]:
        raw = yield from self._ask("GET", "/estimates", subject=subject)
        return Page(tuple(Estimate.of(item) for item in raw["items"]), raw=raw)

    # The cluster

    def gpus(self) -> Steps[Page[Gpu]]:
        raw = yield from self._ask("GET", "/gpus")
        return Page(tuple(Gpu.of(item) for item in raw["items"]), raw=raw)

    def nodes(self) -> Steps[Page[Node]]:
        raw = yield from self._ask("GET", "/nodes")
        return Page(tuple(Node.of(item) for item in raw["items"]), raw=raw)

    def quarantine(self) -> Steps[Page[Quarantined]]:
        raw = yield from self._ask("GET", "/quarantine")
        return Page(tuple(Quarantined.of(item) for item in raw["items"]), raw=raw)

    def release_quarantine(
        self,
        holder: AnyTask,
        reason: str,
        attempts: Sequence[int],
        ranks: Sequence[int],
        devices: Sequence[str],
    ) -> Steps[Released]:
        narrow = {"attempts": list(attempts), "ranks": list(ranks), "devices": list(devices)}
        body = {"reason": reason, **{name: some for name, some in narrow.items() if some}}
        call = Call(
            "POST", f"/quarantine/{_quoted(id_of(holder))}/release", body=_json(body), repeatable=False
        )
        answer = yield from self._send(call)
        return Released.of(answer.json())

    def resume(self, reason: str) -> Steps[Detection]:
        call = Call("POST", "/detection/resume", body=_json({"reason": reason}), repeatable=False)
        answer = yield from self._send(call)
        return filled(Detection, answer.json())

    def models(self) -> Steps[Page[ServedModel]]:
        raw = yield from self._ask("GET", "/models")
        return Page(tuple(filled(ServedModel, item) for item in raw["items"]), raw=raw)

    def model(self, name: str, server: str | None) -> Steps[ServedModel]:
        check_model(name, "model()")
        return filled(ServedModel, (yield from self._ask("GET", f"/models/{_quoted(name)}", server=server)))

    def change_model(
        self, name: str, deed: str, body: Mapping[str, Any] | None, server: str | None
    ) -> Steps[ServedModel]:
        check_model(name, f"{deed}_model()")
        path, waits = f"/models/{_quoted(name)}/{deed}", (body or {}).get("wait_seconds", 0.0)
        call = Call("POST", path, params=_given({"server": server}), body=_json(body), patience_seconds=waits)
        answer = yield from about(name, call, self._retry_seconds)
        return filled(ServedModel, answer.json())

    def infer(
        self, model: str, inputs: "Mapping[str, ArrayLike]", options: InferOptions
    ) -> "Steps[dict[str, NDArray[Any]]]":
        return infer(model, inputs, options, self._retry_seconds)

    def tenants(self) -> Steps[Page[Tenant]]:
        raw = yield from self._ask("GET", "/tenants")
        return Page(tuple(Tenant.of(item) for item in raw["items"]), raw=raw)

    def stats(self) -> Steps[Stats]:
        return Stats.of((yield from self._ask("GET", "/stats")))

    def policy(self) -> Steps[Policy]:
        return Policy.of((yield from self._ask("GET", "/policy")))

    def ready(self) -> Steps[Mapping[str, str]]:
        parts: Mapping[str, str] = (yield from self._ask("GET", "/readyz"))["parts"]
        return parts

    def plan(
        self,
        components: Sequence[Mapping[str, Any]],
        fleet: Sequence[Mapping[str, Any]] | None,
        tenant: str | None,
    ) -> Steps[FleetPlan]:
        body = _given({"components": list(components), "fleet": fleet, "tenant": tenant})
        return FleetPlan.of((yield from self._ask("POST", "/plan", body)))

    # Administration

    def tokens(self) -> Steps[tuple[Token, ...]]:
        raw = yield from self._ask("GET", "/tokens")
        return tuple(Token.of(item) for item in raw["items"])

    def create_token(
        self,
        name: str,
        *,
        scopes: Sequence[str],
        tenant: str | None = None,
        max_priority: int | None = None,
        expires_in_seconds: float | None = None,
    ) -> Steps[Token]:
        wanted = {
            "name": name,
            "scopes": list(scopes),
            "tenant": tenant,
            "max_priority": max_priority,
            "expires_in_seconds": expires_in_seconds,
        }
        call = Call("POST", "/tokens", body=_json(_given(wanted)), repeatable=False)
        answer = yield from self._send(call)
        return Token.of(answer.json())

    def revoke_token(self, name: str) -> Steps[None]:
        yield from self._send(Call("DELETE", f"/tokens/{_quoted(name)}", repeatable=False))

    def shutdown(self, stop_cluster: bool) -> Steps[None]:
        body = _json({"stop_cluster": stop_cluster})
        yield from self._send(Call("POST", "/shutdown", body=body, repeatable=False))


def check_success(outcome: Outcome) -> None:
    """Raises TaskFailed, TaskExpired or TaskCancelled for a task that ended without a result."""
    if outcome.state is TaskState.CANCELLED:
        raise TaskCancelled(outcome.id)
    if outcome.state is not TaskState.SUCCEEDED:
        error = outcome.error or Failure(str(outcome.raw.get("state")), "it left no message")
        fault = TaskExpired if outcome.state is TaskState.EXPIRED else TaskFailed
        raise fault(
            outcome.id,
            kind=error.kind,
            message=error.message,
            traceback=error.traceback,
            log_tail=outcome.log_tail,
        )


def value_of(outcome: Outcome) -> Any:
    """The result of a finished task; unpickles it if it is a pickle. Raises as `check_success` does."""
    check_success(outcome)
    return outcome.value if outcome.data is None else opened(outcome.data)


def _path(task: AnyTask) -> str:
    return f"/tasks/{_quoted(id_of(task))}"


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _json(body: Mapping[str, Any] | None) -> bytes | None:
    return None if body is None else json.dumps(body, allow_nan=False).encode()
