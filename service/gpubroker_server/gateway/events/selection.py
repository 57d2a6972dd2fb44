"""The events that a request asks for, as far as its token may see them."""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Annotated

from msgspec import Struct
from pydantic import Field, StringConstraints

from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.world.events import Event, task_of
from gpubroker_server.http.bodies import EVENT_KIND, Query
from gpubroker_server.http.identity import Identity, Scope
from gpubroker_server.ports.store import TaskStore

_MAX_REMEMBERED = 10_000

Kind = Annotated[str, StringConstraints(max_length=100, pattern=EVENT_KIND)]


class KindQuery(Query):
    kind: Annotated[
        list[Kind],
        Field(
            default_factory=list,
            max_length=100,
            description="Only events of these kinds, such as `task.failed`, or of all of a subject, such as "
            "`task.*`; repeated or separated by commas.",
        ),
    ]


class Selection(Struct, frozen=True):
    """The events that one token may see among those of some tasks, or else of a tenant, or else of all."""

    identity: Identity
    kinds: tuple[str, ...] = ()
    """Kinds, and subjects with a star in place of the change; all kinds if empty."""
    tasks: tuple[TaskId, ...] | None = None
    """The tasks whose events are meant, all of which the token may see; None for the whole log."""
    tenant: str | None = None

    def wants(self, event: Event) -> bool:
        return self._is_of_kind(event.kind) and self._may_see(event)

    @property
    def tenants(self) -> frozenset[str] | None:
        """The tenants in whose events the selected ones are, with an empty name for the events of nodes and
        devices; None if they may be in those of any tenant."""
        if self.tenant is not None:
            return frozenset({self.tenant})
        if self.identity.may(Scope.ADMIN):
            return None
        cluster = {""} if self.identity.may(Scope.CLUSTER_READ) else set()
        return frozenset({self.identity.tenant, *cluster})

    def _is_of_kind(self, kind: str) -> bool:
        return not self.kinds or kind in self.kinds or f"{kind.partition('.')[0]}.*" in self.kinds

    def _may_see(self, event: Event) -> bool:
        if self.tasks is not None:
            return True  # The log is only read for these tasks.
        if self.tenant is not None:
            return event.tenant == self.tenant
        if self.identity.may_see(event.tenant):
            return True
        is_of_cluster = not event.tenant and task_of(event) is None
        return is_of_cluster and self.identity.may(Scope.CLUSTER_READ)


class LabelledTasks:
    """Selects the events of tasks that have certain labels, which are not in the events."""

    def __init__(self, store: TaskStore, labels: Mapping[str, str]) -> None:
        self._store = store
        self._labels = labels
        self._is_labelled: dict[TaskId, bool] = {}

    async def of(self, events: Sequence[Event]) -> Sequence[Event]:
        """Return those of these events whose task has all the labels; all events if no label is asked for."""
        if not self._labels:
            return events
        tasks = {event.position: task_of(event) for event in events}
        await self._look_up({task for task in tasks.values() if task is not None} - self._is_labelled.keys())
        return [event for event in events if self._is_labelled.get(tasks[event.position] or TaskId(""))]

    async def _look_up(self, tasks: Iterable[TaskId]) -> None:
        unknown = sorted(tasks)
        if not unknown:
            return
        if len(self._is_labelled) > _MAX_REMEMBERED:
            self._is_labelled.clear()
        specs = await self._store.specs(unknown)
        for task in unknown:
            labels = specs[task].labels if task in specs else {}
            self._is_labelled[task] = self._labels.items() <= labels.items()


def names_another_task(event: Event) -> bool:
    """Return True if the event may name the task for which its own makes room."""
    return not isinstance(event.payload, Struct) and "freeing_for" in event.payload


async def hidden_tasks(store: TaskStore, identity: Identity, events: Iterable[Event]) -> Container[str]:
    """Return the tasks for which victims made room, as far as this token may not see them."""
    naming = [event for event in events if names_another_task(event)]
    named = {TaskId(task) for event in naming if (task := event.fields.get("freeing_for"))}
    records = {task: await store.record(task) for task in sorted(named)}
    return frozenset(
        task for task, record in records.items() if record is None or not identity.may_see(record.task.tenant)
    )
