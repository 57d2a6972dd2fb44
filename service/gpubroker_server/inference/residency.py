"""The models of one server in the ledger. Only the leader loads and unloads. A gateway makes the task that
holds a model, tells the leader which models are wanted, and waits."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from math import ceil, inf
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

import structlog
from msgspec import Struct
from msgspec.structs import replace

from gpubroker_server.core.admission.admit import AdmissionPolicy, admit
from gpubroker_server.core.admission.facts import Facts, FleetLookup, Refused
from gpubroker_server.core.admission.submission import Asked, Submission
from gpubroker_server.core.domain.decisions import Request
from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.models import ModelKey, ModelRules, first_guess_mb, gpus_fault
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.server_rules import ServerRules
from gpubroker_server.core.domain.submission import MODEL_KIND as KIND
from gpubroker_server.core.domain.task import Task, TaskState, model_of
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, Seconds
from gpubroker_server.core.lifecycle.learning import learned_mb
from gpubroker_server.core.lifecycle.model_lifecycle import needs_want_request
from gpubroker_server.core.lifecycle.model_turns import pinned_in_the_way
from gpubroker_server.core.planning.forecasts.forecast_rounds import ExpectedStart, expected_ready_at
from gpubroker_server.core.planning.forecasts.forecasts import forecast_alone
from gpubroker_server.core.planning.forecasts.reservations import Basis, Forecast
from gpubroker_server.core.planning.model_places import could_be_loaded
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.server_places import gpus_of, place_fault
from gpubroker_server.core.world.world import World
from gpubroker_server.http.faults import problem_of
from gpubroker_server.http.ids import Ids
from gpubroker_server.http.problems import Problem
from gpubroker_server.http.waiters import Waiters, moves_of
from gpubroker_server.ports.model_servers import UnknownModel
from gpubroker_server.ports.models import (
    Described,
    HostFault,
    HostRefused,
    IndexedModel,
    ModelHost,
    ModelState,
)
from gpubroker_server.ports.store import AdmittedTask, Clock, RunSpec, StoreUnavailable, TaskStore

log = structlog.get_logger("gpubroker.tasks.task")

DESCRIBE_SECONDS: Final = Seconds(5.0)
_INDEX_SECONDS: Final = Seconds(0.25)
"""Interval in which a server is asked whether a model that it has lost is back."""

_DEAD_SECONDS: Final = Seconds(5.0)
"""Time after the report of a dead model before which the same model is not reported again."""

_LOAD_TRIES: Final = 3

_TRAILING: Final = "; \n"
"""Characters with which Triton ends the reasons of a failed load."""

_RETRY_SECONDS: Final = 5
"""Value of Retry-After in seconds while it is not known when the model will be ready."""

_HAS_STEPS: Final = frozenset({TaskState.ADMITTED, TaskState.RUNNING})
"""States of an ensemble's holder in which the server has the ensemble's steps in memory, or is loading
them."""

_DOING: Final = {TaskState.ADMITTED: "is being loaded", TaskState.STOPPING: "is being unloaded"}
"""What happens to a model that requests wait for, by the state of its holder."""

_FAILED_SECONDS: Final = Seconds(30.0)
"""Time after a failed load in which requests are refused. A later request has the model loaded again."""


class ResidencyParts(Struct, frozen=True):
    """The parts of the gateway that a Residency uses."""

    world: World
    policy: Policy
    clock: Clock
    store: TaskStore
    ids: Ids
    waiters: Waiters
    fleet: FleetLookup
    admission: AdmissionPolicy
    forecasts: Callable[[], Sequence[Forecast]]
    settle_seconds: Seconds
    """The longest time that a gateway waits until the leader has carried out the gateway's request."""


def _never() -> bool:
    return False


class Uses(NamedTuple):
    """Requests to one model since the last report."""

    times: int
    priority: int
    """The highest priority of these requests."""
    last_at: Instant


class UseCounts:
    def __init__(self) -> None:
        self._by_model: dict[str, Uses] = {}

    def models(self) -> list[str]:
        return list(self._by_model)

    def add(self, model: str, uses: Uses) -> None:
        uses_before = self._by_model.get(model, uses._replace(times=0))
        self._by_model[model] = Uses(
            uses_before.times + uses.times,
            max(uses_before.priority, uses.priority),
            max(uses_before.last_at, uses.last_at),
        )

    def take(self, model: str) -> Uses | None:
        return self._by_model.pop(model, None)


class _Failed(Struct, frozen=True):
    why: str
    revision: str
    until: Instant


class FailedLoads:
    """The failed loads of one server that one gateway has heard of."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._failed: dict[str, _Failed] = {}

    def note(self, model: str, why: str, revision: str, now: Instant) -> Problem:
        """Remember a failed load. Returns the problem that requests get. `revision` is that of the loaded
        files, as in `Described`."""
        self._failed[model] = _Failed(why, revision, Instant(now + _FAILED_SECONDS))
        return self._problem(model, now)

    def forget(self, model: str) -> None:
        """Forget a failed load, because somebody asks for another try."""
        self._failed.pop(model, None)

    def check(self, model: str, revision: str, now: Instant) -> None:
        """Check that the model may be loaded: no load has failed, the files have changed since, or the pause
        after the failure is over. Raises Problem model-not-loaded."""
        failed = self._failed.get(model)
        if failed is None:
            return
        if now < failed.until and revision == failed.revision:
            raise self._problem(model, now)
        del self._failed[model]

    def _problem(self, model: str, now: Instant) -> Problem:
        failed = self._failed[model]
        seconds = max(1, ceil(failed.until - now))
        detail = (
            f"model {model[:100]} is not in memory, its load failed at server {self._server}: "
            f"{failed.why.rstrip(_TRAILING)}; the first request after "
            f"{seconds} s has it loaded again, changed files or POST /models/{{name}}/load at once"
        )
        return Problem("model-not-loaded", detail, headers={"Retry-After": str(seconds)})


class Residency:
    def __init__(self, parts: ResidencyParts, rules: ServerRules, host: ModelHost) -> None:
        self.rules = rules
        self._parts = parts
        self.host = host
        self.failed_loads = FailedLoads(rules.name)
        self._uses = UseCounts()
        self._reported_now: set[str] = set()
        self._dead_until: dict[str, Instant] = {}
        """Model -> the time until which the model is not reported dead again."""
        self._reporting: set[asyncio.Future[None]] = set()
        """The running tasks of `_do`. They are kept here because asyncio keeps no reference to a task."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Model -> the lock under which its holder is made. The references are weak, because clients choose
        the names."""

    # The state in the World and at the server.

    def of(self, model: str) -> Task | None:
        """Return the task that holds the model, or waits for its memory."""
        return self._parts.world.models.of(ModelKey(self.rules.name, model))

    def holders(self) -> list[Task]:
        """Return the holders of all models of this server, without the holder of the server's own base
        cost."""
        tasks, name = self._parts.world.models.live(), self.rules.name
        return [task for task in tasks if (model := model_of(task)).model and model.server == name]

    def memory_of(self, model: str) -> Task | None:
        """Return the task that holds the model's memory, or waits for it: the model's own holder, or the
        holder of a loaded ensemble of which the model is a step."""
        return self.of(model) or self.ensemble_of(model)

    def is_there(self, model: str) -> bool:
        task = self.memory_of(model)
        return task is not None and task.state is TaskState.RUNNING

    async def repository(self) -> Mapping[str, IndexedModel] | None:
        """Return the server's index, or None while the server does not answer."""
        try:
            return (await self.host.index(DESCRIBE_SECONDS)).models
        except HostRefused:
            return None

    def priority_of(self, model: str) -> int:
        """Return the priority of requests to the model that state none."""
        model_priority = self.rules_of(model).priority
        return self.rules.priority if model_priority is None else model_priority

    def rules_of(self, model: str) -> ModelRules:
        return self.rules.models.get(model, ModelRules())

    def try_again(self, model: str) -> None:
        """Allow a load by hand, even if one has failed lately."""
        self.failed_loads.forget(model)

    # Reports to the leader.

    def note_use(self, model: str, priority: int) -> None:
        """Count a use of the model. The use is reported at once if the leader might give the model's memory
        away, and otherwise with the next report."""
        now = self._parts.clock.now()
        self._uses.add(model, Uses(1, priority, now))
        task = self.memory_of(model)
        if task is None or task.state is not TaskState.RUNNING or model in self._reported_now:
            return
        if needs_want_request(task, priority, now):
            self._reported_now.add(model)
            self._do(self._report_now(model))

    async def report_use(self) -> None:
        """Tell the leader when models were used. Raises StoreUnavailable, and keeps the unreported uses for
        the next report."""
        for model in self._uses.models():
            await self._report_uses(model)

    async def _report_uses(self, model: str) -> None:
        """Tell the leader when this model was used. Raises StoreUnavailable and keeps the uses for the next
        report."""
        # The uses are taken before the call, so that uses during the call are counted for the next report.
        uses, task = self._uses.take(model), self.memory_of(model)
        if uses is None or task is None:
            return
        times, priority, last_at = uses
        try:
            await self.ask_leader(task, "want", priority=priority, uses=times, used_at=last_at)
        except StoreUnavailable:
            self._uses.add(model, uses)
            raise

    async def _report_now(self, model: str) -> None:
        try:
            with suppress(StoreUnavailable):  # The next report has the uses.
                await self._report_uses(model)
        finally:
            self._reported_now.discard(model)

    def _do(self, reporting: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(reporting)
        self._reporting.add(task)
        task.add_done_callback(self._reporting.discard)

    def report_dead(self, model: str) -> None:
        """Have the leader check whether the model's process is alive."""
        now = self._parts.clock.now()
        if self.is_there(model) and now >= self._dead_until.get(model, now):
            self._dead_until[model] = Instant(now + _DEAD_SECONDS)
            self._do(self._report_dead(model))

    async def _report_dead(self, model: str) -> None:
        task = self.memory_of(model)
        if task is not None:
            with suppress(StoreUnavailable):  # A later request to the model reports it again.
                priority = model_of(task).asked_priority
                await self.ask_leader(task, "want", priority=priority, uses=0, doubted=True)

    async def ask_leader(self, task: Task, what: str, **fields: object) -> bool:
        """Ask the leader for a change. Returns True if the leader has carried it out within
        `settle_seconds`. Raises StoreUnavailable."""
        parts = self._parts
        now = parts.clock.now()
        request = Request(parts.ids.request(now), task.id, task.tenant, what, fields, now)
        # The answer is expected before the write, so that an immediate answer is not missed.
        with parts.waiters.expect(request.id) as done:
            await parts.store.request(request)
            return await done.within(parts.settle_seconds)

    # Waiting.

    async def ready(
        self,
        model: str,
        priority: int,
        seconds: Seconds | None = None,
        *,
        unless: Callable[[], bool] = _never,
    ) -> Task:
        """Have the model loaded, and wait until it is in memory: at most `seconds`, by default
        `cold_seconds`. Returns early once `unless` returns True, because another server has the model. Raises
        Problem model-not-ready, with a Retry-After, or model-not-loaded if the load failed."""
        until = self._parts.clock.now() + (self.rules.cold_seconds if seconds is None else seconds)
        task = await self.want(model, priority)
        was_leaving = False
        while True:
            # The move is expected before the state is read, so that no move in between is missed.
            with self._parts.waiters.expect(moves_of(task.id)) as moved:
                now = self._parts.clock.now()
                holder = self._parts.world.tasks.get(task.id) or await self._row(task)
                if holder.state is TaskState.RUNNING or unless():
                    return holder
                # The holder was already leaving before, and its end says nothing about this request.
                if holder.is_terminal and was_leaving and holder.state is not TaskState.FAILED:
                    task, was_leaving = await self.want(model, priority), False
                    continue
                if holder.is_terminal:
                    raise await self._failed(holder)
                was_leaving = holder.state is TaskState.STOPPING
                if now >= until or self._parts.waiters.is_closed:
                    raise self._not_ready(holder, now)
                # The model stays wanted as long as a request waits, however short `wanted_seconds` is.
                again_seconds = min(1.0, self.rules.wanted_seconds / 4)
                await moved.within(Seconds(min(until - now, again_seconds)))
            await self._keep_wanted(self._parts.world.tasks.get(task.id, holder), priority)

    async def returned(self, model: str, *, unless: Callable[[], bool] = _never) -> None:
        """Wait for a model that the ledger has and the server denies. The wait ends when the ledger no longer
        has the model, the server has it again, or `unless` returns True because another server has it.
        Raises Problem."""
        now = self._parts.clock.now
        until = now() + self.rules.cold_seconds
        denied = self.memory_of(model)
        while denied is not None and _is_unchanged(denied, self.memory_of(model)):
            if unless():
                return
            indexed = (await self.repository() or {}).get(model)
            if indexed is not None and indexed.stage is ModelState.READY:
                return
            with self._parts.waiters.expect(moves_of(denied.id)) as moved:
                if not _is_unchanged(denied, self.memory_of(model)):
                    return
                if now() >= until or self._parts.waiters.is_closed:
                    raise self._not_ready(denied, now())
                await moved.within(_INDEX_SECONDS)

    async def unloaded(self, model: str, by: str) -> None:
        """Have the model unloaded at the request of this token, and wait until it is gone. Raises Problem
        model-not-ready, or model-is-step."""
        self.check_unload(model)
        task = self.of(model)
        if task is None:
            return
        with self._parts.waiters.expect(task.id) as ended:
            await self.ask_leader(task, "cancel", by=by)
            if not await ended.within(self.rules.cold_seconds) and self.of(model) is not None:
                detail = f"model {model[:100]} is not gone yet: its server still has requests for it"
                raise Problem("model-not-ready", detail)

    def _not_ready(self, task: Task, now: Instant) -> Problem:
        start = self._expected_ready_at(task, now)
        seconds = _RETRY_SECONDS if start is None else max(1, ceil(start.p50_at - now))
        if start is None:
            when = place_fault(self._parts.world, self.rules) or _pinned(self._parts.world, task)
            when = when or "it is not known when it will be"
        elif model_of(task).load_seconds:
            when = f"it is expected to be there in {seconds} s"
        else:
            when = f"room for it is expected in {seconds} s, and how long it loads is not known yet"
            seconds = max(_RETRY_SECONDS, seconds)
        detail = (
            f"model {task.name} is not in memory, it {_DOING.get(task.state, 'waits for it')} "
            f"at server {self.rules.name}: {when}; it stays wanted, GET /tasks/{task.id}/explain "
            "(scope tasks:read) says what it waits for"
        )
        return Problem("model-not-ready", detail, headers={"Retry-After": str(seconds)})

    async def seconds_until_ready(self, model: str, priority: int) -> float:
        """Return the time after which there is room for the model, apart from its load: 0 if there is room or
        other holders make room for it; infinite if it is not known, or if the server cannot have the model.
        Makes no holder. Raises StoreUnavailable."""
        parts, now = self._parts, self._parts.clock.now()
        task = self.memory_of(model)
        try:
            if task is None:
                asked, described, _ = await self.demand_of(model)
                task = self._new(model, asked, self._terms(model, priority, described.steps), now).task
        except (Problem, UnknownModel):
            return inf
        if could_be_loaded(parts.world, task, gpus_of(parts.world, self.rules), parts.policy, now):
            return 0.0
        start = self._expected_ready_at(task, now) or self._expected_alone(task, now)
        return inf if start is None else max(0.0, start.p50_at - now)

    def _expected_ready_at(self, task: Task, now: Instant) -> ExpectedStart | None:
        """Return the start that the forecasts for the first tasks of the queue expect. For other tasks,
        return when there would be room without the rest of the queue, as `explain` does."""
        start = expected_ready_at(self._parts.world, task, self._parts.forecasts(), now)
        if start is None and task.id in self._parts.world.queue:
            start = self._expected_alone(task, now)
        return start

    def _expected_alone(self, task: Task, now: Instant) -> ExpectedStart | None:
        """Return when a task that waits, or would wait, could start without the rest of the queue."""
        world = self._parts.world
        alone = forecast_alone(Draft(world), task, self._parts.policy, now, [NodeName(self.rules.node)])
        if alone is None or alone.basis is Basis.GUESS:
            return None
        return expected_ready_at(world, task, (alone,), now)

    async def _failed(self, task: Task) -> Problem:
        record = await self._parts.store.record(task.id)
        failure = None if record is None else record.failure
        why = "it was unloaded" if failure is None else failure.get("message", "")
        if failure is not None and failure.get("kind") == "load_failed":
            revision = await self._revision(task.name)
            return self.failed_loads.note(task.name, why, revision, self._parts.clock.now())
        return Problem("model-not-loaded", f"model {task.name} is not in memory ({task.state.value}): {why}")

    async def _revision(self, model: str) -> str:
        try:
            return (await self.host.describe(model, DESCRIBE_SECONDS)).revision
        except HostRefused:
            return ""

    async def _row(self, task: Task) -> Task:
        record = await self._parts.store.record(task.id)
        return task if record is None else record.task

    # Making holders.

    async def want(self, model: str, priority: int, *, queued: bool = False, measured: bool = False) -> Task:
        """Return the task that holds the model's memory, and make one if there is none. `queued` is True for
        queued inferences, for which the leader keeps the model wanted. `measured` is True if the model is
        loaded to be measured. Raises Problem, UnknownModel, StoreUnavailable."""
        # With the lock this gateway makes one holder per model. The store refuses a second holder of another
        # gateway.
        async with self._locks.setdefault(model, asyncio.Lock()):
            task = self.memory_of(model)
            if task is None:
                return await self._enter(model, priority, queued=queued, measured=measured)
            if not queued:
                await self._keep_wanted(task, priority)
            return task

    async def _keep_wanted(self, task: Task, priority: int) -> None:
        if needs_want_request(task, priority, self._parts.clock.now()):
            await self.ask_leader(task, "want", priority=priority, uses=1)

    async def _enter(self, model: str, priority: int, *, measured: bool, **fields: Any) -> Task:
        asked, described, sized = await self.demand_of(model)
        self.failed_loads.check(model, described.revision, self._parts.clock.now())
        now = self._parts.clock.now()
        fields |= {"measured": measured, "sized": sized and not measured}
        terms = self._terms(model, priority, described.steps, asked_at=now, **fields)
        return await self._submit(model, asked, terms, now)

    async def steps_of(self, model: str) -> Sequence[str]:
        """Return the models that are loaded with an ensemble. Raises Problem, UnknownModel."""
        return (await self.demand_of(model, is_there=True))[1].steps

    async def adopt(self, model: str) -> None:
        """Make a holder for a model that is in memory without one. The holder's leases are on the GPUs where
        the model is, and no request has asked for the model. Raises Problem, UnknownModel,
        StoreUnavailable."""
        asked, described, sized = await self.demand_of(model, is_there=True)
        now, terms = self._parts.clock.now(), self._terms(model, 0, described.steps, sized=sized)
        await self._submit(model, asked, terms, now, held=True)

    async def follow_settings(self) -> None:
        """Replace holders that an earlier start of the service made under other settings: the holder of the
        base cost, and holders that wait for another size or other GPUs. Call this only once per start,
        because gateways may run with different settings while an operator restarts one after the other.
        Raises Problem, UnknownModel, StoreUnavailable."""
        for task in self.holders():
            if task.state is TaskState.PENDING and not task.held:
                asked, _, _ = await self.demand_of(task.name)
                # An ensemble without a size of its own has the sum of its steps' sizes.
                sizes = (self.rules_of(name).gpu_mb for name in (task.name, *model_of(task).steps))
                is_given = any(size_mb is not None for size_mb in sizes)
                if not _asks_for(task, asked, same_size=is_given):
                    await self.ask_leader(task, "cancel", by="settings")
        base, rules = self.of(""), self.rules
        if base is not None and rules.base_mb and not _asks_for(base, self._base_asked()):
            with self._parts.waiters.expect(base.id) as ended:
                await self.ask_leader(base, "cancel", by="settings")
                await ended.within(self._parts.settle_seconds)

    def _base_asked(self) -> Asked:
        rules = self.rules
        return _asked(max(1, self._gpus_seen), rules.base_mb, self._where(rules.devices))

    @property
    def _gpus_seen(self) -> int:
        """The number of GPUs on which the server has its base cost; 0 while its node has not joined, unless
        the settings name the GPUs."""
        return len(self.rules.devices) or len(gpus_of(self._parts.world, self.rules))

    async def hold_base(self) -> None:
        """Have the server's base cost counted as the settings say. Raises Problem, StoreUnavailable."""
        rules, task = self.rules, self.of("")
        if task is not None and (not rules.base_mb or task.demand.gpus < self._gpus_seen):
            # When the node was not there yet, its GPUs could not be counted; the next check holds them all.
            await self.ask_leader(task, "cancel", by="settings")
        elif task is None and rules.base_mb:
            terms = Model(rules.name, "", rules.wanted_seconds, 0, sized=True, address=self.host.address)
            name, now = f"{rules.name} itself", self._parts.clock.now()
            await self._submit(name, self._base_asked(), terms, now, held=True)

    def _terms(self, model: str, priority: int, steps: tuple[str, ...], **fields: Any) -> Model:
        rules, load_seconds = self.rules, self.rules_of(model).load_seconds
        return Model(
            rules.name,
            model,
            rules.wanted_seconds,
            priority,
            load_seconds=load_seconds,
            steps=steps,
            address=self.host.address,
            **fields,
        )

    async def _submit(
        self, name: str, asked: Asked, terms: Model, now: Instant, *, held: bool = False
    ) -> Task:
        """Submit a holder. Returns the new task, or the task that another gateway has submitted for the
        model. Raises Problem for a model that could never be loaded at this server."""
        new, store = self._new(name, asked, terms, now, held=held), self._parts.store
        outcome = await store.submit(new)
        record = None if outcome.task == new.task.id else await store.record(outcome.task)
        return new.task if record is None else record.task

    def _new(
        self, name: str, asked: Asked, terms: Model, now: Instant, *, held: bool = False
    ) -> AdmittedTask:
        """Return a holder that is not submitted yet. `held` is True if the memory is in use already, so that
        it is not checked whether it fits. Raises Problem for a model that could never be loaded at this
        server."""
        parts, rules = self._parts, self.rules
        submission = Submission(
            tenant=rules.tenant,
            spec=RunSpec(kind=KIND),
            demand=asked,
            name=name,
            priority=terms.asked_priority,
            max_retries=_LOAD_TRIES - 1,
            grace_seconds=rules.grace_seconds,
            held=held,
            holder=terms,
        )
        new = admit(submission, Facts(parts.ids.task(now), now, parts.fleet, sender=None), parts.admission)
        if isinstance(new, Refused):
            raise problem_of(new)
        return new

    async def demand_of(self, model: str, *, is_there: bool = False) -> tuple[Asked, Described, bool]:
        """Return the demand of a load of the model, the description of the model, and True if its size is
        known. With `is_there`, the model is in memory already and counts on all GPUs of the server. Raises
        Problem, UnknownModel."""
        rules, granted_mb = self.rules, self.rules_of(model).gpu_mb
        server_devices = [ledger.device for ledger in gpus_of(self._parts.world, rules)]
        try:
            described = await self.host.describe(model, DESCRIBE_SECONDS)
        except HostRefused as refused:
            if refused.fault is HostFault.NOT_FOUND and (granted_mb is None or await self._lacks(model)):
                raise UnknownModel(str(refused)) from None
            if granted_mb is None:
                detail = f"server {rules.name} does not describe model {model[:100]}: {refused}"
                raise Problem("model-not-loaded", detail) from None
            described = Described()
        size_mb, sized = await self._size_of(model, described, {device.kind for device in server_devices})
        uuids = described.seen or [device.uuid for device in server_devices]
        gpus = max(1, len(uuids)) if is_there else self.rules_of(model).gpus
        if size_mb and (fault := gpus_fault(rules.name, uuids, gpus)):
            raise Problem("no-matching-device", f"model {model[:100]} cannot be loaded: {fault}")
        where = self._where(described.seen or rules.devices)
        return _asked(gpus if size_mb else 0, size_mb or None, where), described, sized

    async def _size_of(self, model: str, described: Described, kinds: set[str]) -> tuple[Mib, bool]:
        """Return the size of the model in MiB, and True if the size is known: given by the operator,
        measured, or 0 for a model that runs on CPUs. An unknown size is estimated from the files. An ensemble
        has no memory of its own: if its size is unknown, it is the sum of the sizes of its steps, which are
        loaded with it."""
        granted_mb = self.rules_of(model).gpu_mb
        size_mb = Mib(0) if granted_mb is None and described.on_cpu else granted_mb
        if size_mb is None:
            world, margin = self._parts.world, self._parts.policy.learned_margin
            size_mb = learned_mb(world, self.rules.tenant, model, kinds, margin, described.versions)
        if size_mb is not None:
            return size_mb, True
        if described.steps:
            sizes = [
                await self._size_of(step, replace(await self._described(step), steps=()), kinds)
                for step in described.steps
            ]
            return Mib(sum(mb for mb, _ in sizes)), all(sized for _, sized in sizes)
        return first_guess_mb(described.file_bytes, self.rules.least_mb), False

    async def _described(self, model: str) -> Described:
        try:
            return await self.host.describe(model, DESCRIBE_SECONDS)
        except HostRefused:
            return Described()

    def ensemble_of(self, model: str) -> Task | None:
        """Return the holder of an ensemble that has the model in memory, or is loading it, as a step."""
        for task in self.holders():
            if task.state in _HAS_STEPS and model in model_of(task).steps:
                return task
        return None

    def check_unload(self, model: str) -> None:
        """Raise Problem model-is-step if a loaded ensemble needs the model."""
        if (ensemble := self.ensemble_of(model)) is not None:
            raise Problem("model-is-step", model=model[:100], ensemble=ensemble.name[:100])

    async def _lacks(self, model: str) -> bool:
        """Return True if the server says that its repository has no such model."""
        index = await self.repository()
        return index is not None and model not in index

    def _where(self, uuids: Sequence[str]) -> PlacementConstraints:
        return PlacementConstraints(nodes=(("node", (self.rules.node,)),), devices=tuple(sorted(uuids)))


def _pinned(world: World, task: Task) -> str:
    """Return a sentence about the pinned models that hold memory which the task could have; empty if there
    are none."""
    models = [f'"{model_of(other).model[:100]}"' for other in pinned_in_the_way(world, task.demand)]
    if not models:
        return ""
    which = f"model {models[0]} is" if len(models) == 1 else f"models {', '.join(models[:3])} are"
    return f"{which} pinned where it could be loaded; unpin one (`gpubroker pin NAME --off`)"


def _asks_for(task: Task, asked: Asked, *, same_size: bool = True) -> bool:
    """Return True if the holder asks for the GPUs of `asked` and, with `same_size`, for as much memory of
    each."""
    demand = task.demand
    is_same_place = (demand.where.devices, demand.where.nodes) == (asked.where.devices, asked.where.nodes)
    return is_same_place and (not same_size or (demand.gpus, demand.gpu_mb) == (asked.gpus, asked.gpu_mb))


def _asked(gpus: int, gpu_mb: Mib | None, where: PlacementConstraints) -> Asked:
    """Return the demand of a model, which takes memory of GPUs and nothing else of a node."""
    return Asked(gpus=gpus, gpu_mb=gpu_mb, cpu=0.0, memory_mb=0, where=where)


def _is_unchanged(before: Task, now: Task | None) -> bool:
    """Return True if the model is in memory as before: its holder is not under notice, and the model was not
    loaded again."""
    is_there = now is not None and now.state is TaskState.RUNNING
    return is_there and now is not None and (now.id, now.fence) == (before.id, before.fence)
