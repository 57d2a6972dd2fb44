"""A gateway reports which models its requests use, and drains models that are to leave: it reports a model as
drained when none of its requests to that model is unanswered."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

from gpubroker_server.core.domain.model_orders import ModelsInUse
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import TaskState, model_of
from gpubroker_server.core.domain.units import Instant, Seconds, mark_of
from gpubroker_server.core.lifecycle import model_turns
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.last_values import PRESENT_SECONDS, Presence, PresenceStore
from gpubroker_server.ports.store import Clock, StoreUnavailable

_REPORT_SECONDS: Final = Seconds(PRESENT_SECONDS / 5)
"""Interval in which the gateway reports that it is present."""

_CHECK_SECONDS: Final = Seconds(0.05)
"""Interval in which the gateway looks for changes while the leader waits for its reports."""

_WAITS: Final = frozenset({"task.stopping", "task.submitted", "task.requeued"})
"""Kinds of events after which the leader may wait for a report."""


class Requests(Protocol):
    """The requests of this gateway."""

    def now(self) -> float: ...

    def has_older(self, model: str, at: float) -> bool:
        """Return True if a request to the model that was sent at `at` or earlier is not answered yet. `at` is
        a time of the clock `now`."""
        ...

    def in_use(self) -> ModelsInUse:
        """Return the models that have a request at this gateway, under way or waiting, or had one lately."""
        ...


class Draining:
    def __init__(self, world: World, requests: Requests, policy: Policy) -> None:
        self._world = world
        self._policy = policy
        self._requests = requests
        self._leaving_since: dict[str, float] = {}
        """Claim of a model -> the time at which this gateway learned that the model is to leave. Later
        requests go elsewhere, so only older ones can hold the claim."""
        self._woken = asyncio.Event()

    def drained(self) -> frozenset[str]:
        """Return the claims of models that are to leave and have no request of this gateway left."""
        leaving = {
            mark_of(task.id, task.fence, 0): (model_of(task).model, *model_of(task).steps)
            for task in self._world.models.live()
            if task.state is TaskState.STOPPING
        }
        since = {claim: self._leaving_since.get(claim, self._requests.now()) for claim in leaving}
        self._leaving_since = since
        return frozenset(
            claim
            for claim, models in leaving.items()
            if not any(self._requests.has_older(model, since[claim]) for model in models)
        )

    def in_use(self) -> ModelsInUse:
        """Return the models that have a request at this gateway, or had one lately. An ensemble is included
        if one of its steps is, because it holds the memory of its steps."""
        used = self._requests.in_use()
        ensembles = [model for task in self._world.models.live() if (model := model_of(task)).steps]

        def with_ensembles(names: frozenset[str]) -> frozenset[str]:
            return names.union(model.model for model in ensembles if not names.isdisjoint(model.steps))

        return ModelsInUse(with_ensembles(used.names), with_ensembles(used.recent))

    def on_events(self, events: Sequence[Event]) -> None:
        """Have `keep_reporting` look at once if the leader may wait for a report. The World must have applied
        the events already."""
        if any(event.kind in _WAITS for event in events):
            self._woken.set()

    async def report(self, store: PresenceStore, name: str, at: Instant) -> Presence:
        """Write what this gateway has drained and what it uses. Raises StoreUnavailable."""
        in_use = self.in_use()
        presence = Presence(name, at, self.drained(), in_use.names, in_use.recent)
        await store.present(presence)
        return presence

    async def keep_reporting(self, store: PresenceStore, name: str, clock: Clock) -> None:
        """Report at each change and at regular intervals, until cancelled. A failed report is repeated at the
        next look."""
        last = Presence(name, Instant(0.0))
        while True:
            # The event is cleared before the look: what happens during a report is reason for another look.
            self._woken.clear()
            at = clock.now()
            is_contended = model_turns.is_contended(self._world, at, self._policy)
            is_news = self.drained() != last.let_go or (
                is_contended and self.in_use() != ModelsInUse(last.in_use, last.recent)
            )
            if is_news or at >= last.at + _REPORT_SECONDS:
                with suppress(StoreUnavailable):
                    last = await self.report(store, name, at)
            is_waiting = is_contended or len(self._leaving_since) > len(last.let_go)
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_SECONDS if is_waiting else _REPORT_SECONDS):
                    await self._woken.wait()
