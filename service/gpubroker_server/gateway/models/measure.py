"""The route that measures the memory that a model takes. The model is loaded, asked at its batch sizes while
its GPU is measured, and unloaded. The leader learns the size from this load as from any other."""

from collections.abc import Sequence
from typing import Annotated, Final

from fastapi import Query, Response
from gpubroker.wire.models import MeasuredModel
from pydantic import Field

from gpubroker_server.core.admission.defaults import first
from gpubroker_server.core.domain.task import Task, model_of
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, Seconds
from gpubroker_server.core.lifecycle.learning import added, learned_mb, topic_of, unmeasurable
from gpubroker_server.core.world.ledger import DeviceLedger
from gpubroker_server.core.world.server_places import gpus_of
from gpubroker_server.gateway.models.models import ModelParts, Parts, no_such_model
from gpubroker_server.gateway.models.routes import LOAD_PROBLEMS, ServerQuery, note
from gpubroker_server.gateway.submission.task_body import Priority
from gpubroker_server.http.bodies import Body, JsonBody
from gpubroker_server.http.faults import refuse
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.problems import Problem
from gpubroker_server.http.routing import Caller, Resource, answer
from gpubroker_server.ports.model_servers import ModelResidency, UnknownModel
from gpubroker_server.ports.models import HostRefused

resource = Resource("models")

_SAMPLES: Final = 2
"""The number of samples of the GPU that are awaited at each batch size. When the second sample has arrived,
the leader has counted the first."""

_PERIODS: Final = 15
"""The number of sample periods without a sample after which the GPU counts as not measured."""

_REQUEST_SECONDS: Final = Seconds(300.0)

Rows = Annotated[int, Field(ge=1, le=65_536)]
Shape = Annotated[list[Annotated[int, Field(ge=1, le=2**31)]], Field(max_length=16)]


class MeasureModel(Body):
    batch_sizes: Annotated[list[Rows], Field(max_length=16)] = Field(default_factory=list)
    """Rows of the requests with which the model is asked; by default 1, and the most that the model takes."""
    shapes: Annotated[dict[str, Shape], Field(max_length=64)] = Field(default_factory=dict)
    """The shapes of single inputs, without rows; by default the model's own, and 1 where any length will
    do."""
    priority: Priority | None = None
    """The priority of the load; by default that of the model's configuration."""
    wait_seconds: Annotated[float, Field(ge=0, le=3600)] = 300.0
    """The longest wait until the model is in memory."""


@resource.route(
    "POST /models/{name}/measure",
    "models_measure",
    Scope.MODELS_MANAGE,
    MeasuredModel,
    f"{LOAD_PROBLEMS} model-not-ready model-in-use not-measurable",
)
async def measure_model(
    caller: Caller,
    parts: Parts,
    name: str,
    query: Annotated[ServerQuery, Query()],
    body: JsonBody[MeasureModel],
) -> Response:
    """Measure how much GPU memory a model takes: load it, ask it with zeros at its batch sizes, unload it.
    Its later loads lease the size that is learned from all its loads, unless the settings name a `gpu_mb`."""
    residency = await _home(parts, name, query.server)
    permissions = parts.app.rules.permissions
    if body.priority is not None:
        refuse(permissions.check_priority(caller, body.priority))
    priority = first(body.priority, permissions.default_priority(caller, residency.priority_of(name)))
    try:
        ledger = await _ledger(parts, residency, name)
        residency.try_again(name)
        task = await residency.want(name, priority, measured=True)
    except UnknownModel as unknown:
        raise no_such_model(name, str(unknown)) from None
    await note(caller, parts, task, "model.measure")
    try:
        task = await residency.ready(name, priority, Seconds(body.wait_seconds))
        kind = ledger.device.kind
        versions = model_of(task).versions
        topic = topic_of(task.tenant, name, kind, versions)
        before = parts.app.world.learned.sketch(topic)
        sizes = await _ask(parts, residency, task, body, ledger.device.key)
    finally:
        await residency.unloaded(name, caller.name)
    measured_mb = added(before, parts.app.world.learned.sketch(topic))
    if measured_mb is None:
        raise Problem(
            "not-measurable",
            f"nothing was learned of {name[:100]}: what it took of GPU {ledger.device.uuid} is too little to "
            "be told, or something else there changed meanwhile; try again when nothing starts or ends there",
        )
    margin = parts.app.policy.learned_margin
    configured = residency.rules_of(name).gpu_mb
    learned = learned_mb(parts.app.world, task.tenant, name, {kind}, margin, versions)
    return answer(
        MeasuredModel(
            name=name,
            server=residency.rules.name,
            device=ledger.device.uuid,
            kind=kind,
            batch_sizes=tuple(sizes),
            measured_mb=round(measured_mb),
            next_mb=configured or learned or Mib(round(measured_mb)),
            configured=configured is not None,
        )
    )


async def _home(parts: ModelParts, name: str, server: str | None) -> ModelResidency:
    """Return the server that has the model in its repository, or that may have it because it does not answer.
    Raises Problem if there is no such server, or more than one."""
    if server is not None:
        return parts.at(server)
    repositories = {residency: await residency.repository() for residency in parts.residencies}
    holders = [residency for residency in repositories if name in (repositories[residency] or ())]
    holders = holders or [residency for residency in repositories if repositories[residency] is None]
    if len(holders) > 1:
        servers = [residency.rules.name for residency in holders]
        raise Problem("model-ambiguous", model=name[:100], servers=", ".join(servers), first=servers[0])
    if not holders:
        raise no_such_model(name, "it is in no repository")
    return holders[0]


async def _ledger(parts: ModelParts, residency: ModelResidency, name: str) -> DeviceLedger:
    """Return the ledger of the GPU on which the model can be measured now. Raises Problem or UnknownModel if
    the model cannot be measured."""
    # The ensemble holds the memory of its steps, so a step of a loaded ensemble is in memory, too.
    if (task := residency.of(name) or residency.ensemble_of(name)) is not None:
        raise Problem("model-in-use", model=task.name[:100], state=task.state.value, task=task.id)
    demand = (await residency.demand_of(name))[0]
    if demand.gpus != 1:
        placement = f"it is spread over {demand.gpus} GPUs" if demand.gpus else "it runs on CPUs"
        raise Problem("not-measurable", f"model {name[:100]} leases what its settings say: {placement}")
    ledgers = gpus_of(parts.app.world, residency.rules)
    candidates = [
        ledger for ledger in ledgers if not demand.where.devices or ledger.device.uuid in demand.where.devices
    ]
    if len(candidates) != 1:
        raise Problem(
            "not-measurable", f"its server {residency.rules.name} has no GPU on a node that is here"
        )
    clock, policy = parts.app.clock, parts.app.policy
    if fault := unmeasurable(parts.app.world, candidates[0], clock.now(), policy.sample_period_seconds):
        raise Problem("not-measurable", fault)
    return candidates[0]


async def _ask(
    parts: ModelParts, residency: ModelResidency, task: Task, body: MeasureModel, device: DeviceKey
) -> Sequence[int]:
    """Send requests to the model at each batch size while its GPU is measured, and return the batch sizes.
    Raises Problem not-measurable."""
    try:
        most_rows = await residency.host.most_rows(task.name, _REQUEST_SECONDS)
        sizes = body.batch_sizes or sorted({min(1, most_rows), most_rows})
        for rows in sizes:
            await _ask_while_measured(parts, residency, task.name, rows, body, device)
    except HostRefused as refused:
        detail = f"model {task.name[:100]} did not answer a request with zeros: {refused}"
        raise Problem("not-measurable", f"{detail}; say which batch_sizes and shapes it takes") from None
    return [rows for rows in sizes if rows]


async def _ask_while_measured(
    parts: ModelParts, residency: ModelResidency, model: str, rows: int, body: MeasureModel, device: DeviceKey
) -> None:
    """Send requests with `rows` rows until the GPU has been measured twice. Raises HostRefused if the model
    does not answer, and Problem not-measurable if the GPU is not measured."""
    now, period_seconds = (
        parts.app.clock.now,
        parts.app.policy.sample_period_seconds,
    )
    seen: set[Instant] = set()
    await residency.host.try_out(model, rows, body.shapes, _REQUEST_SECONDS)
    since = now()
    while len(seen) < _SAMPLES:
        await residency.host.try_out(model, rows, body.shapes, _REQUEST_SECONDS)
        sampled_at = parts.app.world.ledgers[device].sampled_at
        if sampled_at is not None and sampled_at > since:
            seen.add(sampled_at)
        elif now() > since + _PERIODS * period_seconds:
            raise Problem("not-measurable", f"GPU {device.rpartition('/')[2]} was not measured meanwhile")
