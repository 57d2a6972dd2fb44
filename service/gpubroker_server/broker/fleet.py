"""Fleet control of one term: looks at the fleet every few seconds, beside the cycles. A cycle takes over what
it found, so that nothing changes in the middle of a plan."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from gpubroker_server.core.control.fleet import FleetControl, FleetRules, FleetSeen, background_room
from gpubroker_server.core.domain.decisions import Decision, Notice
from gpubroker_server.core.domain.orders import Loaded
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Move
from gpubroker_server.core.domain.units import Seconds, TaskId
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.idle_templates import IdleTemplates
from gpubroker_server.ports.store import Clock, StoreUnavailable


class HostUse(NamedTuple):
    """Of the machine of this process, in percent; None: not known."""

    disk_percent: float | None
    """Of the fullest disk that the service writes to."""
    memory_percent: float | None


class FleetKeeper:
    def __init__(
        self,
        rules: FleetRules,
        world: World,
        policy: Policy,
        clock: Clock,
        host_use: Callable[[], HostUse],
        commit_seconds: Callable[[], float],
        templates: IdleTemplates,
    ) -> None:
        """`commit_seconds`: how long commits take now."""
        self._control = FleetControl(rules, policy)
        self._templates = templates
        self._world = world
        self._policy = policy
        self._clock = clock
        self._host_use = host_use
        self._commit_seconds = commit_seconds
        self._admission_seconds: float | None = None
        """How long the task waited that was admitted last."""
        self._news: list[Notice] = []
        self._is_new = False
        for task in world.tasks.values():
            self._control.fill.note(task, is_new=False)

    def watch(self, loads: Mapping[TaskId, Loaded]) -> None:
        """`loads`: what workers of sets last told, as it changes."""
        self._control.loads = loads

    @property
    def seen(self) -> FleetSeen:
        return self._control.seen

    async def keep(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._policy.sample_period_seconds)

    async def look(self) -> None:
        host = await asyncio.to_thread(self._host_use)
        now = self._clock.now()
        if self._control.is_idle_check_due(now):
            with suppress(StoreUnavailable):  # the last ones go on to hold
                found = await self._templates.idle_templates(now)
                self._control.fill.templates = [one.template for one in found]
        self._news += self._control.step(self._world, self._pressures(host), now)
        self._is_new = True

    def take(self) -> Sequence[Decision]:
        """Let the World know what was found since the last cycle; returns what the log is to say of it, until
        it is `told`."""
        if self._is_new:
            self._is_new = False
            room = background_room(self._world, self._policy, self.seen.background_mb)
            self._world.control(room, self.seen.full_disks, self.seen.stream_weights)
        return [Decision(notice.key, "fleet", notices=(notice,)) for notice in self._news]

    def told(self, decisions: Sequence[Decision]) -> None:
        """These are committed."""
        del self._news[: len(decisions)]

    def on_committed(self, decisions: Sequence[Decision]) -> None:
        """What became of reports."""
        self._control.memory_failures.note(decisions)

    def on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            task = event.task or self._world.tasks.get(TaskId(event.key))
            if task is None:
                continue
            if event.kind == f"task.{Move.SUBMITTED}":
                self._control.fill.note(task, is_new=True)
            elif event.kind == f"task.{Move.ADMITTED}" and task.admitted_at is not None:
                self._admission_seconds = Seconds(task.admitted_at - task.queued_at)

    def _pressures(self, host: HostUse) -> Mapping[str, float | None]:
        pending = self._world.pending
        return {
            "queue_length": float(pending.total()),
            "admission_seconds": self._admission_seconds if pending else 0.0,
            "store_seconds": self._commit_seconds(),
            "disk_percent": host.disk_percent,
            "host_memory_percent": host.memory_percent,
            **{f"queue:{tenant}": float(count) for tenant, count in pending.items()},
        }
