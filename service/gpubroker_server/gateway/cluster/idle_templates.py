"""Routes that make, list and delete idle templates, and the job that submits their tasks while devices are
idle."""

import asyncio
from contextlib import suppress
from typing import Annotated

import msgspec
import structlog
from fastapi import Response
from gpubroker.wire.answered import Listed, Time
from gpubroker.wire.fleet import IdleTemplate as ShownTemplate
from msgspec.structs import replace
from pydantic import Field, StringConstraints

from gpubroker_server.core.admission.facts import Refused
from gpubroker_server.core.control.idle_templates import NAME_PREFIX, Template, TemplateSeen
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.submission.submissions import SentKey, body_hash
from gpubroker_server.gateway.submission.task_body import SubmitTask
from gpubroker_server.gateway.submission.translation import submission_of
from gpubroker_server.http.bodies import NAME, Body, JsonBody
from gpubroker_server.http.faults import invalid, problem_of
from gpubroker_server.http.identity import Identity, Scope
from gpubroker_server.http.problems import Fault, Problem
from gpubroker_server.http.routing import Call, Resource, answer
from gpubroker_server.http.times import rfc3339
from gpubroker_server.ports.idle_templates import IdleTemplate
from gpubroker_server.ports.last_values import LeaderSeen
from gpubroker_server.ports.store import StoreUnavailable

log = structlog.get_logger("gpubroker.idle_templates")

resource = Resource("cluster")

SUBMIT_SECONDS = 2.0
"""The interval at which a gateway looks for tasks to submit."""
WAIT_SECONDS = 60.0
"""The queue TTL of a template's task. A device that was idle is in use if the task does not start within
it."""
MAX_BYTES = 256 * 1024
"""The largest body of a template's tasks, because every leader reads all templates."""
MAX_TEMPLATES = 32
"""The largest number of templates, because the leader searches them for each idle device every few
seconds."""
MAX_WEIGHT = 1000
_OURS = frozenset({"priority", "held", "name", "after", "not_before", "queue_ttl_seconds", "deadline_at"})
"""Fields of a task's body that the service sets, or that make no sense for a task that is submitted again and
again."""


class CreateIdleTemplate(Body):
    name: Annotated[
        str,
        StringConstraints(pattern=NAME),
        Field(description="The tasks of the template are named `idle/` and this name."),
    ]
    task: Annotated[
        SubmitTask,
        Field(
            description="A body as for `POST /tasks`, without "
            + ", ".join(f"`{name}`" for name in sorted(_OURS))
        ),
    ]
    weight: Annotated[
        int,
        Field(ge=1, le=MAX_WEIGHT, description="Templates share what is idle in proportion to it."),
    ] = 1
    max_running: Annotated[int, Field(ge=1, le=100_000)]


@resource.route(
    "POST /idle-templates",
    "idle_templates_create",
    Scope.CLUSTER_WRITE,
    ShownTemplate,
    "malformed-json priority-not-allowed payload-too-large unsupported-media-type validation-failed "
    "exceeds-capacity no-matching-device exceeds-maximum exceeds-quota pool-mismatch unknown-resource "
    "priority-too-low entrypoint-not-allowed python-mismatch leader-outdated idle-template-exists",
    status_code=201,
)
async def create_idle_template(call: Call, parts: Parts, body: JsonBody[CreateIdleTemplate]) -> Response:
    """Make a template of tasks for idle devices.

    While a device is idle, a task of the template is submitted for it at the lowest priority, and another one
    when that task ends. Tasks that need the memory get it by preemption. The template stops submitting when
    the token that made it is deleted or expires.
    """
    identity = call.identity
    raw = bytes(msgspec.json.decode(await call.body(), type=dict[str, msgspec.Raw])["task"])
    _check_body(body.task, raw)
    _check_scopes(identity)
    try:
        submission = submission_of(_task(body.name, body.task), identity.tenant)
        demand = (await parts.submissions.admitted(identity, submission)).task.demand
    except Problem as problem:
        problem.errors = [replace(fault, pointer=f"/task{fault.pointer}") for fault in problem.errors]
        raise
    if demand.bundles:
        detail = "a gang is for no idle device; leave ranks and bundles out"
        raise invalid(Fault(pointer="/task/resources", detail=detail, code="not-in-a-template"))
    templates = await parts.store.idle_templates()
    if len(templates) >= MAX_TEMPLATES:
        detail = f"there are {len(templates)} idle templates, and may be {MAX_TEMPLATES}; delete some"
        raise invalid(Fault(pointer="", detail=detail, code="too-many-templates"))
    template = IdleTemplate(
        Template(body.name, demand, body.weight, body.max_running),
        identity.tenant,
        raw.decode(),
        parts.tokens.hash_named(identity.name),
        identity.name,
        parts.clock.now(),
    )
    if not await parts.store.put_idle_template(template):
        raise Problem("idle-template-exists", name=body.name)
    return answer(await _shown(parts, template, {}), 201, {"Location": f"/idle-templates/{body.name}"})


@resource.route("GET /idle-templates", "idle_templates_list", Scope.CLUSTER_READ, Listed[ShownTemplate])
async def list_idle_templates(call: Call, parts: Parts) -> Response:
    """List the idle templates of your tenant, or with the scope admin those of all tenants."""
    leader = parts.leadership.leader()
    seen = (
        {}
        if leader is None or leader.fleet is None
        else {template.name: template for template in leader.fleet.templates}
    )
    templates = await parts.store.idle_templates()
    visible = [template for template in templates if call.identity.may_see(template.tenant)]
    return answer(Listed(tuple([await _shown(parts, template, seen) for template in visible])))


@resource.route(
    "DELETE /idle-templates/{name}",
    "idle_templates_delete",
    Scope.CLUSTER_WRITE,
    None,
    "not-found",
    status_code=204,
)
async def delete_idle_template(call: Call, parts: Parts, name: str) -> Response:
    """Delete an idle template. Its tasks that run or wait are kept; cancel them if you do not need them."""
    templates = await parts.store.idle_templates()
    is_visible = any(
        template.name == name and call.identity.may_see(template.tenant) for template in templates
    )
    if not is_visible or not await parts.store.drop_idle_template(name, by=call.identity.name):
        raise Problem(
            "not-found", f'there is no idle template "{name[:100]}"; GET /idle-templates lists them'
        )
    return Response(status_code=204)


async def keep_filling(parts: Parts) -> None:
    """Submit the tasks that the leader finds missing, until cancelled. All gateways do so with equal
    idempotency keys, so each task is stored once."""
    refused: dict[str, str] = {}
    while True:
        leader = parts.leadership.leader()
        if leader is not None and leader.fleet is not None:
            with suppress(StoreUnavailable):
                await fill(parts, leader, refused)
        await asyncio.sleep(SUBMIT_SECONDS)


async def fill(parts: Parts, leader: LeaderSeen, refused: dict[str, str]) -> None:
    """Submit the missing tasks of all templates once. `refused` maps a template to the reason why its last
    task was refused, so that each reason is logged once."""
    fleet = leader.fleet
    wanted = (
        {} if fleet is None else {template.name: template for template in fleet.templates if template.missing}
    )
    for template in await parts.store.idle_templates() if wanted else ():
        if (seen := wanted.get(template.name)) is None:
            continue
        try:
            for number in range(seen.number, seen.number + seen.missing):
                await _submit(parts, template, f"{leader.term}/{number}")
            refused.pop(template.name, None)
        except Problem as problem:
            if refused.get(template.name) != problem.detail:
                refused[template.name] = problem.detail
                log.warning("idle template submits nothing", template=template.name, fault=problem.detail)


async def _submit(parts: Parts, template: IdleTemplate, number: str) -> None:
    """Submit one task of the template. Raises Problem if the task is refused."""
    identity = _holder(parts, template)
    # The key contains `made_at`, because a deleted template of this name had tasks with these numbers.
    key = f"{NAME_PREFIX}{template.name}/{template.made_at}/{number}"
    # All gateways submit the task with one key, so they must also have one hash.
    sent = SentKey(key, await body_hash("task", identity.tenant, template.task.encode()))
    submission = submission_of(_task(template.name, _parsed(template)), identity.tenant)
    await parts.submissions.accept(identity, submission, sent)


def _parsed(template: IdleTemplate) -> SubmitTask:
    return SubmitTask.model_validate_json(template.task)


def _task(name: str, body: SubmitTask) -> SubmitTask:
    """Return the body of a template's task, with the fields that the service sets."""
    own_fields = {"name": f"{NAME_PREFIX}{name}", "priority": 0, "queue_ttl_seconds": WAIT_SECONDS}
    return body.model_copy(update=own_fields)


def _holder(parts: Parts, template: IdleTemplate) -> Identity:
    """Return the holder of the token that made the template. Raises Problem if the token is gone, or lacks
    the scopes."""
    identity = parts.tokens.holder(template.token)
    if identity is None:
        raise Problem("forbidden", f'the token "{template.made_by}" that made it was deleted or has expired')
    _check_scopes(identity)
    return identity


def _check_scopes(identity: Identity) -> None:
    identity.require(Scope.CLUSTER_WRITE, "an idle template")
    identity.require(Scope.TASKS_WRITE, "submitting the tasks of an idle template")


def _why_paused(seen: TemplateSeen) -> str | None:
    until = seen.paused_until
    return None if until is None else f"its last task failed; the next is submitted at {rfc3339(until)}"


async def _why_stopped(parts: Parts, template: IdleTemplate) -> str | None:
    """Return why a task of the template would be refused; None if it would not. The state of the queue is not
    considered."""
    submissions, body = parts.submissions, _task(template.name, _parsed(template))
    try:
        identity = _holder(parts, template)
        verdict = await submissions.judged(identity, submission_of(body, identity.tenant))
    except Problem as problem:
        return problem.detail
    return problem_of(verdict).detail if isinstance(verdict, Refused) else None


def _check_body(body: SubmitTask, raw: bytes) -> None:
    faults = [
        Fault(pointer=f"/task/{name}", detail="is not for a template: leave it out", code="not-in-a-template")
        for name in sorted(_OURS & body.model_fields_set)
    ]
    if len(raw) > MAX_BYTES:
        detail = f"has {len(raw)} bytes, and may have {MAX_BYTES}; put large arguments into an object"
        faults.append(Fault(pointer="/task", detail=detail, code="too-large"))
    if faults:
        raise invalid(*faults)


async def _shown(parts: Parts, template: IdleTemplate, seen: dict[str, TemplateSeen]) -> ShownTemplate:
    now = seen.get(template.name, TemplateSeen(template.name))
    return ShownTemplate(
        name=template.name,
        tenant=template.tenant,
        weight=template.template.weight,
        max_running=template.template.max_running,
        made_by=template.made_by,
        made_at=Time.at(template.made_at),
        running=now.running,
        waiting=now.waiting,
        stopped=await _why_stopped(parts, template) or _why_paused(now),
    )
