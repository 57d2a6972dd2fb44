"""When memory is expected back: of each holder, of each device, and for a task that waits for it."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from service.core.draft import Draft
from service.core.estimate import Topic, What, bucket_of
from service.core.expectations import Remaining, remaining_seconds
from service.core.lease import LeaseState
from service.core.ledger import Book, Holding
from service.core.lessons import kind_of_run
from service.core.survey import NodeFinding, Survey
from service.core.task import Task, TaskState
from service.core.trial import Planner
from service.core.units import DeviceKey, Instant, Seconds, TaskId
from service.core.world import World

MOST_NODES = 8
"""So many nodes are looked at closely, those that promise most."""

AT_ONCE: Final = Remaining(Seconds(0.0), Seconds(0.0), 0)


class Horizon:
    """What one World expects, as of one instant. Runs of one subject and about one age share an answer."""

    def __init__(self, world: World, now: Instant) -> None:
        self._world = world
        self._now = now
        self._known: dict[tuple[Topic, int], Remaining | None] = {}
        sketches = world.learned.sketches
        self._taught = {(topic.tenant, topic.subject) for topic in sketches if topic.what is What.SECONDS}
        """(tenant, subject) of which run times are known, on whatever devices."""

    def of_run(self, run: Task) -> Remaining | None:
        """How much longer it holds what it has; None if nobody can tell."""
        if run.state is TaskState.STOPPING:
            left = Seconds(max(0.0, (run.stop_deadline_at or self._now) - self._now))
            return Remaining(left, left, 0)
        if run.is_terminal:
            return AT_ONCE  # over, and its memory is on its way back
        is_taught = (run.tenant, run.subject) in self._taught
        if run.expected_seconds is None and not is_taught:
            return None
        begun = run if run.started_at is not None else replace(run, started_at=self._now)
        if begun.expected_seconds is not None:
            stated = remaining_seconds(begun, {}, self._now)
            if stated is not None:
                return stated
        if not is_taught:
            return None
        sketches = self._world.learned.sketches
        topic = Topic(run.tenant, run.subject, kind_of_run(self._world, run), What.SECONDS)
        if topic not in sketches:
            return None
        age = (topic, bucket_of(self._now - (begun.started_at or self._now)))
        if age not in self._known:
            self._known[age] = remaining_seconds(begun, sketches, self._now, kind=topic.kind)
        return self._known[age]

    def of_holding(self, holding: Holding) -> Remaining | None:
        """None as well for what nobody can confirm to be gone."""
        lease = holding.lease
        run = self._world.holder(lease.holder, lease.fence)
        if run is None or lease.state is LeaseState.QUARANTINED:
            return None
        return self.of_run(run)

    def of_device(self, book: Book, missing_mb: int, task: TaskId) -> Remaining | None:
        """When so much more will be free on a device, if nobody else takes it; None if nobody can tell.

        What is being freed for others does not count."""
        if missing_mb <= 0:
            return AT_ONCE
        coming = (held for held in book.holdings.values() if held.freeing_for in (None, task))
        known = ((self.of_holding(holding), holding.takes_mb) for holding in coming)
        ends = sorted(((end, mb) for end, mb in known if end is not None), key=lambda pair: _soonest(pair[0]))
        for at, (_, mb) in enumerate(ends):
            missing_mb -= mb
            if missing_mb <= 0:
                return later(end for end, _ in ends[: at + 1])
        return None

    def start_of(self, seen: Survey, free_in: dict[DeviceKey, Remaining]) -> Remaining | None:
        """When the task would have room if nobody who waits as well took it; None if nobody can tell.

        `free_in`: when each device that it may use will have enough. Devices first, and then whatever else
        of the node must come back.
        """
        gpus, best = seen.task.demand.gpus, None
        promising: list[tuple[Seconds, str, Remaining, NodeFinding]] = []
        for node in seen.nodes:
            if not (node.is_usable and node.is_large_enough):
                continue
            ends = sorted((free_in[key] for key in _keys(node) if key in free_in), key=_soonest)[:gpus]
            if len(ends) == gpus:
                first = later(ends)
                promising.append((first.p50_seconds, node.node.name, first, node))
        for _, _, first, node in sorted(promising, key=lambda entry: entry[:2])[:MOST_NODES]:
            if best is not None and first.p50_seconds >= best.p50_seconds:
                break
            found = self._start_on(seen, node, first)
            if found is not None and (best is None or found.p50_seconds < best.p50_seconds):
                best = found
        return best

    def _start_on(self, seen: Survey, node: NodeFinding, first: Remaining) -> Remaining | None:
        """Let its runs end one after another until there is room."""
        draft, name = Draft(seen.draft.world), node.node.name
        draft.receive(name)
        known = ((self.of_run(run), run) for run in draft.runs_on(name))
        ends = sorted(
            ((end, run) for end, run in known if end is not None),
            key=lambda pair: (_soonest(pair[0]), pair[1].id),
        )
        latest = first
        for end, run in ends:
            if end.p50_seconds > first.p50_seconds and self._fits(draft, seen, node):
                return latest
            draft.dismiss(run)
            latest = later((latest, end))
        return latest if self._fits(draft, seen, node) else None

    def _fits(self, draft: Draft, seen: Survey, node: NodeFinding) -> bool:
        planner = Planner(draft, seen.policy, seen.now, seen.forecasts)
        return planner.place_on([node.node.name], seen.task) is not None


def later(ends: Iterable[Remaining]) -> Remaining:
    """When all of them have come; it rests on the fewest runs that one of them rests on."""
    known = tuple(ends)
    counts = [end.n for end in known if end.n]
    return Remaining(
        max((end.p50_seconds for end in known), default=Seconds(0.0)),
        max((end.p90_seconds for end in known), default=Seconds(0.0)),
        min(counts, default=0),
    )


def _soonest(end: Remaining) -> tuple[float, float]:
    return end.p50_seconds, end.p90_seconds


def _keys(node: NodeFinding) -> Iterator[DeviceKey]:
    return (finding.book.device.key for finding in node.devices)
