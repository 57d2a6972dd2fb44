"""Models of a server in the ledger, as those who ask for them see it: there, coming, or not to be had now."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from typing import Any
from weakref import WeakValueDictionary

import structlog

from gpubroker_server.core.domain.decisions import Request
from gpubroker_server.core.domain.demand import Demand, Where
from gpubroker_server.core.domain.models import Home, ModelTerms, first_guess_mb
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.submission import MODEL_KIND as KIND
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant, NodeName, Seconds
from gpubroker_server.core.lifecycle.learning import learned_mb
from gpubroker_server.core.lifecycle.model_lifecycle import needs_want_request
from gpubroker_server.core.planning.backfill import Forecast
from gpubroker_server.core.planning.expected_start import there_at
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.http.ids import Ids
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.waiters import Waiters, moves_of
from gpubroker_server.gateway.proxy.residency.server_rules import ModelRules, ServerRules, place_fault
from gpubroker_server.gateway.submission.capacity import Capacity
from gpubroker_server.ports.models import Described, HostFault, HostRefused, IndexedModel, ModelHost, Stage
from gpubroker_server.ports.store import Clock, RunSpec, StoreUnavailable, Submission, TaskStore

log = structlog.get_logger("gpubroker.tasks.task")

DESCRIBE_SECONDS = Seconds(5.0)
LOOK_SECONDS = Seconds(0.25)
"""So often a server is asked whether a model is back that it has lost."""

TELL_SECONDS = Seconds(30.0)
"""So often the leader is told which models were used."""

DOUBT_SECONDS = Seconds(5.0)
"""So long the leader has to see to a model that has not answered, before it is told again."""

LOAD_TRIES = 3
"""A model whose load fails so often is not tried again for those who ask now."""


@dataclass(frozen=True, slots=True)
class ResidencyParts:
    """What residencies need of the gateway."""

    world: World
    policy: Policy
    clock: Clock
    store: TaskStore
    ids: Ids
    waiters: Waiters
    capacity: Capacity
    forecasts: Callable[[], Sequence[Forecast]]
    settle_seconds: Seconds
    """How long a request to the leader waits until it is carried out."""


class UnknownModel(Exception):
    """The server has no such model."""


class Residency:
    """Of one server. Only the leader loads and unloads: here it is told who wants what."""

    def __init__(self, parts: ResidencyParts, rules: ServerRules, host: ModelHost) -> None:
        self.rules = rules
        self._parts = parts
        self._host = host
        self._uses: Counter[str] = Counter()
        self._priorities: dict[str, int] = {}
        """Since the leader was last told, by model."""
        self._doubted: dict[str, Instant] = {}
        """Until when the leader is not told again, by model."""
        self._telling: set[asyncio.Future[None]] = set()
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Of models that somebody asks for at the moment: names come from clients."""

    def of(self, model: str) -> Task | None:
        """Who has it, or waits for it."""
        return self._parts.world.homes.of(Home(self.rules.name, model))

    def holders(self) -> list[Task]:
        """Of all its models that are there, or are waited for."""
        here = (task for task in self._parts.world.homes.live() if task.model is not None)
        return [
            task for task in here if task.model and task.model.server == self.rules.name and task.model.model
        ]

    async def repository(self) -> Mapping[str, IndexedModel] | None:
        """What the server says that it has; None while it does not answer."""
        try:
            return (await self._host.index(DESCRIBE_SECONDS)).models
        except HostRefused:
            return None

    def is_there(self, model: str) -> bool:
        task = self.of(model)
        return task is not None and task.state is TaskState.RUNNING

    def priority_of(self, model: str, asked: int | None = None) -> int:
        if asked is not None:
            return asked
        own = self._rules_of(model).priority
        return self.rules.priority if own is None else own

    def note_use(self, model: str, priority: int) -> None:
        self._uses[model] += 1
        self._priorities[model] = max(priority, self._priorities.get(model, 0))

    def doubt(self, model: str) -> None:
        """Have the leader see whether it is alive. It is told soon, and once in a while."""
        now = self._parts.clock.now()
        if self.is_there(model) and now >= self._doubted.get(model, now):
            self._doubted[model] = Instant(now + DOUBT_SECONDS)
            telling = asyncio.ensure_future(self._tell_of_doubt(model))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

    async def _tell_of_doubt(self, model: str) -> None:
        task = self.of(model)
        if task is not None and task.model is not None:
            with suppress(StoreUnavailable):  # whoever asks next says it again
                await self.ask_leader(task, "want", priority=task.model.asked_priority, uses=0, doubted=True)

    async def keep_telling(self, every_seconds: Seconds = TELL_SECONDS) -> None:
        """Which models are used, until cancelled."""
        while True:
            await asyncio.sleep(every_seconds)
            try:
                await self.tell()
            except StoreUnavailable as fault:
                log.warning("the use of models is told later", fault=str(fault))

    async def tell(self) -> None:
        """Raises StoreUnavailable: what was not told is told the next time."""
        for model in list(self._uses):
            uses, priority = self._uses.pop(model), self._priorities.pop(model)
            task = self.of(model)
            try:
                if task is not None:
                    await self.ask_leader(task, "want", priority=priority, uses=uses)
            except StoreUnavailable:
                self._uses[model] += uses
                self._priorities[model] = max(priority, self._priorities.get(model, 0))
                raise

    async def ready(self, model: str, priority: int, seconds: Seconds | None = None) -> Task:
        """Wait until it is there, and have it brought if it is not. Raises Problem: model-not-ready, with
        when to come again, at once where that is known to be too late; model-not-loaded, if it failed."""
        until = self._parts.clock.now() + (self.rules.cold_seconds if seconds is None else seconds)
        task = await self.want(model, priority)
        was_leaving = False
        while True:
            with self._parts.waiters.expect(moves_of(task.id)) as moved:
                now = self._parts.clock.now()
                known = self._parts.world.tasks.get(task.id) or await self._row(task)
                if known.state is TaskState.RUNNING:
                    return known
                if known.is_terminal and was_leaving and known.state is not TaskState.FAILED:
                    task, was_leaving = await self.want(model, priority), False
                    continue
                if known.is_terminal:
                    raise await self._failed(known)
                was_leaving = known.state is TaskState.STOPPING
                if now >= until or self._parts.waiters.is_closed or self._is_too_late(known, until, now):
                    raise self._not_ready(known, now)
                await moved.within(Seconds(min(until - now, 1.0)))
            await self._keep_wanted(known, priority)

    async def back(self, model: str) -> None:
        """Wait for a model that is there as far as the picture goes, and of which the server says that it has
        none: until one of them tells otherwise. Raises Problem."""
        now = self._parts.clock.now
        until = now() + self.rules.cold_seconds
        said = self.of(model)
        while said is not None and _is_same(said, self.of(model)):
            if await self._has(model):
                return
            with self._parts.waiters.expect(moves_of(said.id)) as moved:
                if not _is_same(said, self.of(model)):
                    return
                if now() >= until or self._parts.waiters.is_closed:
                    raise self._not_ready(said, now())
                await moved.within(LOOK_SECONDS)

    async def _has(self, model: str) -> bool:
        found = (await self.repository() or {}).get(model)
        return found is not None and found.stage is Stage.READY

    async def want(self, model: str, priority: int, *, queued: bool = False) -> Task:
        """Its holder, made if there is none. `queued`: for an inference in the queue, for which the leader
        keeps it wanted. Raises Problem, UnknownModel, StoreUnavailable."""
        async with self._asking.setdefault(model, asyncio.Lock()):
            task = self.of(model)
            if task is None:
                return await self._enter(model, priority, queued=queued)
            if not queued:
                await self._keep_wanted(task, priority)
            return task

    async def _keep_wanted(self, task: Task, priority: int) -> None:
        """Whoever waits for it wants it, at his own priority."""
        if needs_want_request(task, priority, self._parts.clock.now()):
            await self.ask_leader(task, "want", priority=priority, uses=1)

    async def ask_leader(self, task: Task, what: str, **fields: object) -> bool:
        """Whether it was carried out by the time that this is back."""
        parts = self._parts
        now = parts.clock.now()
        request = Request(parts.ids.request(now), task.id, task.tenant, what, fields, now)
        with parts.waiters.expect(request.id) as done:
            await parts.store.request(request)
            return await done.within(parts.settle_seconds)

    async def unloaded(self, model: str) -> None:
        """Have it unloaded, and wait until it is gone. Raises Problem model-not-ready."""
        task = self.of(model)
        if task is None:
            return
        with self._parts.waiters.expect(task.id) as ended:
            await self.ask_leader(task, "cancel")
            if not await ended.within(self.rules.cold_seconds) and self.of(model) is not None:
                detail = f"model {model[:100]} is not gone yet: its server still has requests for it"
                raise Problem("model-not-ready", detail)

    async def _enter(self, model: str, priority: int, *, queued: bool) -> Task:
        parts, rules = self._parts, self.rules
        demand, described = await self._demand(model)
        parts.capacity.check(demand, priority, rules.tenant, at="")
        seconds, now = self._rules_of(model).load_seconds, parts.clock.now()
        terms = ModelTerms(
            rules.name, model, rules.wanted_seconds, priority, asked_at=now, queued=queued,
            load_seconds=seconds, steps=described.steps,
        )  # fmt: skip
        wanted_until = Instant(now + rules.wanted_seconds)
        return await self._submit(self._holder(model, demand, terms, now, expires_at=wanted_until))

    async def steps_of(self, model: str) -> Sequence[str]:
        """Of an ensemble the models that come and go with it. Raises Problem, UnknownModel."""
        return (await self._demand(model))[1].steps

    async def adopt(self, model: str) -> None:
        """Enter what the server has in memory and nobody holds: it gets its leases where it is, and waits for
        none as long as nobody asks for it. Raises Problem, UnknownModel, StoreUnavailable."""
        demand, described = await self._demand(model)
        seconds, now = self._rules_of(model).load_seconds, self._parts.clock.now()
        wanted_seconds = self.rules.wanted_seconds
        terms = ModelTerms(
            self.rules.name, model, wanted_seconds, 0, load_seconds=seconds, steps=described.steps
        )
        until = Instant(now + wanted_seconds)
        await self._submit(self._holder(model, demand, terms, now, expires_at=until, held=True))

    async def hold_base(self) -> None:
        """Have what the server itself takes counted, as the settings say, or no longer. Raises Problem,
        StoreUnavailable."""
        rules, task, now = self.rules, self.of(""), self._parts.clock.now()
        if task is not None and not rules.base_mb:
            await self.ask_leader(task, "cancel")
        elif task is None and rules.base_mb:
            demand = Demand(gpus=max(1, len(rules.devices)), gpu_mb=rules.base_mb, where=self._where())
            demand = self._parts.capacity.settled(demand, "", rules.tenant, {}, at="")
            terms = ModelTerms(rules.name, "", rules.wanted_seconds, 0)
            await self._submit(self._holder(f"{rules.name} itself", demand, terms, now, held=True))

    def _holder(self, name: str, demand: Demand, terms: ModelTerms, now: Instant, **fields: Any) -> Task:
        rules, id = self.rules, self._parts.ids.task(now)
        fields |= {"max_retries": LOAD_TRIES - 1, "grace_seconds": rules.grace_seconds, "model": terms}
        return Task(id, rules.tenant, name, terms.asked_priority, demand, now, **fields)

    async def _submit(self, task: Task) -> Task:
        """Or the one that somebody else has submitted for the same."""
        parts = self._parts
        outcome = await parts.store.submit(Submission(task, RunSpec(kind=KIND)))
        record = None if outcome.task == task.id else await parts.store.record(outcome.task)
        return task if record is None else record.task

    async def _demand(self, model: str) -> tuple[Demand, Described]:
        """What the operator says, else what was measured, else a guess by its files. Raises Problem."""
        rules, said = self.rules, self._rules_of(model)
        try:
            described = await self._host.describe(model, DESCRIBE_SECONDS)
        except HostRefused as refused:
            if refused.fault is HostFault.NOT_FOUND and (said.gpu_mb is None or await self._lacks(model)):
                raise UnknownModel(str(refused)) from None
            if said.gpu_mb is None:
                raise Problem(
                    "model-not-loaded", f"server {rules.name} tells nothing of model {model[:100]}: {refused}"
                ) from None
            described = Described()
        size_mb = said.gpu_mb
        if size_mb is None:
            world, margin = self._parts.world, self._parts.policy.learned_margin
            size_mb = learned_mb(world, rules.tenant, model, self._kinds(), margin, described.versions)
        if size_mb is None:
            size_mb = first_guess_mb(described.file_bytes, rules.least_mb)
        demand = Demand(gpus=1 if size_mb else 0, gpu_mb=size_mb or None, where=self._where())
        return self._parts.capacity.settled(demand, "", rules.tenant, {}, at=""), described

    async def _lacks(self, model: str) -> bool:
        """Whether its server says that it has none of that name, loaded or not."""
        index = await self.repository()
        return index is not None and model not in index

    def _kinds(self) -> set[str]:
        """Of the GPUs that it may use."""
        world, rules = self._parts.world, self.rules
        devices = (world.books[key].device for key in world.by_node.get(NodeName(rules.node), ()))
        return {device.kind for device in devices if not rules.devices or device.uuid in rules.devices}

    def _where(self) -> Where:
        rules = self.rules
        return Where(nodes=(("node", (rules.node,)),), devices=tuple(sorted(rules.devices)))

    def _rules_of(self, model: str) -> ModelRules:
        return self.rules.models.get(model, ModelRules())

    async def _row(self, task: Task) -> Task:
        record = await self._parts.store.record(task.id)
        return task if record is None else record.task

    def _starts_at(self, task: Task, now: Instant) -> Instant | None:
        """When it is likely to be there; None if nobody can tell."""
        start = there_at(self._parts.world, task, self._parts.forecasts(), now)
        return None if start is None else start.p50_at

    def _is_too_late(self, task: Task, until: float, now: Instant) -> bool:
        at = self._starts_at(task, now) if task.state is TaskState.PENDING else None
        return at is not None and at > until

    def _not_ready(self, task: Task, now: Instant) -> Problem:
        at = self._starts_at(task, now)
        seconds = 5 if at is None else max(1, ceil(at - now))
        unknown = place_fault(self._parts.world, self.rules) or "nobody can tell when"
        when = unknown if at is None else f"it is expected to be there in {seconds} s"
        detail = (
            f"model {task.name} is not in memory ({task.state.value}): {when}; "
            f"it stays wanted, GET /tasks/{task.id}/explain says what it waits for"
        )
        return Problem("model-not-ready", detail, headers={"Retry-After": str(seconds)})

    async def _failed(self, task: Task) -> Problem:
        record = await self._parts.store.record(task.id)
        failure = None if record is None else record.failure
        why = "it was unloaded" if failure is None else failure.get("message", "")
        return Problem("model-not-loaded", f"model {task.name} is not in memory ({task.state.value}): {why}")


def _is_same(said: Task, known: Task | None) -> bool:
    """It is there as it was: neither under notice nor loaded anew."""
    is_there = known is not None and known.state is TaskState.RUNNING
    return is_there and known is not None and (known.id, known.fence) == (said.id, said.fence)
