"""From a body to the task that it would be: the same for a submit and for a question about one."""

from dataclasses import replace
from typing import NamedTuple

from gpubroker_server.core.domain.demand import Demand, may_use_device
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.explain.gang_admission import ranks_in_words
from gpubroker_server.core.planning.run_estimates import Size, learned_size, size_of_ranks
from gpubroker_server.gateway.http.routing import Call
from gpubroker_server.gateway.status.task_view import arguments_of, spec_of, task_of
from gpubroker_server.gateway.submission.demand import demand_of, subject_of
from gpubroker_server.gateway.submission.dependencies import Stands, dependencies_of, stands_for
from gpubroker_server.gateway.submission.permission import check_priority, check_run, check_stream
from gpubroker_server.gateway.submission.task_body import SubmitTask
from gpubroker_server.ports.store import RunSpec


class Intake(NamedTuple):
    task: Task
    learned: Size | None
    """How its size was learned, if it asks for that; of a gang, that of its ranks."""


async def take_in(call: Call, body: SubmitTask) -> Intake:
    """Raises Problem for what is wrong with it, but for what it may not do and what could never run here."""
    stands, now = await stands_for(call, body), call.parts.clock.now()
    return taken_in(call, body, call.parts.ids.task(now), stands, now)


def taken_in(call: Call, body: SubmitTask, id: TaskId, stands: Stands, now: Instant) -> Intake:
    """As `take_in`; `stands`: of the tasks that it runs after, those that there are."""
    parts, tenant = call.parts, call.identity.tenant
    check_stream(parts.policy, body.stream)
    demand, learned = demand_in(call, body, tenant)
    after = dependencies_of(body, stands, tenant)
    task = task_of(body, demand, tenant, parts.defaults, id=id, now=now, after=after)
    return Intake(task, learned)


def demand_in(
    call: Call, body: SubmitTask, tenant: str, *, at: str = "/resources"
) -> tuple[Demand, Size | None]:
    """What it asks for, and how its size was learned if it asks for that, or those of its ranks. Raises
    Problem if its pool does not fit; `at` is where in the request the resources stand."""
    parts = call.parts
    sizes: dict[Demand, Size] = {}

    def learn(asked: Demand) -> Size:
        return sizes.setdefault(asked, _learned_size(call, asked, tenant, subject_of(body)))

    asked = demand_of(body, parts.defaults, learn)
    told = {_in_words(asked, whole, size): size for whole, size in sizes.items()}
    learned = size_of_ranks(told) if told else None
    return parts.capacity.settled(asked, body.resources.pool, tenant, body.labels, at=at), learned


def check_allowed(call: Call, body: SubmitTask, task: Task) -> None:
    """Raises Problem for what the token or the operator does not allow."""
    if body.run is not None:
        check_run(call, body.run)
    check_priority(call, task.priority)


def check_possible(call: Call, task: Task) -> None:
    """Raises Problem for what could never run here, or for longer than anything may."""
    call.parts.capacity.check(task.demand, task.priority, task.tenant)
    call.parts.capacity.check_times(task)


async def stored_spec(call: Call, body: SubmitTask, task: Task, learned: Size | None) -> RunSpec:
    """Large arguments are on disk before the row that names them."""
    arguments = arguments_of(body.run)
    return spec_of(body, body.run, arguments, await digest_if_large(call, arguments, task.id), learned)


async def digest_if_large(call: Call, arguments: bytes, task: TaskId) -> str | None:
    """Of the object that holds them, if they do not stay in the row."""
    if len(arguments) <= call.parts.limits.inline_bytes:
        return None
    return await call.parts.blobs.put(arguments, owner=task)


def _in_words(asked: Demand, whole: Demand, size: Size) -> str:
    """Which ranks of a gang were given this size."""
    return ranks_in_words(asked, replace(whole, gpu_mb=size.gpu_mb)) if asked.bundles else ""


def _learned_size(call: Call, asked: Demand, tenant: str, subject: str) -> Size:
    """What runs like it used of the devices that it may use."""
    world = call.parts.world
    devices = [book.device for book in world.books.values() if may_use_device(asked, book.device)]
    return learned_size(world.learned.sketches, tenant, subject, devices, call.parts.policy)
