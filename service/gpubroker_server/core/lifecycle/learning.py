"""What the end of a run teaches about the next run of the same subject."""

from collections.abc import Iterator, Sequence
from itertools import islice

from gpubroker_server.core.domain.decisions import Decision, TaskWrite
from gpubroker_server.core.domain.estimates import Lesson, Sketch, Topic, What
from gpubroker_server.core.domain.gang_member import MemberState
from gpubroker_server.core.domain.task import Move, Task, TaskState
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.domain.values import changed
from gpubroker_server.core.world.world import World

MOST_TOPICS = 10_000
"""With more, those are forgotten that have learned nothing for the longest time."""

_OTHER_ENDS = frozenset({Move.REQUEUED, Move.FAILED, Move.CANCELLED, Move.EXPIRED})


def learn(
    world: World, decisions: Sequence[Decision], now: Instant, most_topics: int = MOST_TOPICS
) -> list[Decision]:
    """The decisions of one batch, each with what the runs that it ends teach.

    A run that succeeded teaches the most that it used of each kind of device, and how long it took unless
    it resumed earlier work. One that ended otherwise did not do its work and teaches nothing, except how
    much memory it took where that was more than its lease: else nobody would ever lease enough. Each rank of
    a gang teaches what it used when it ends itself, the gang how long it took.
    """
    known: dict[Topic, Sketch] = {}
    taught: list[Decision] = []
    for decision in decisions:
        lessons: list[Lesson] = []
        for write in decision.tasks:
            for topic, value in _values(world, write):
                sketch = known.get(topic) or world.learned.sketch(topic)
                known[topic] = sketch.add(value)
                lessons.append(Lesson(topic, value, known[topic], now))
        taught.append(changed(decision, lessons=tuple(lessons)) if lessons else decision)
    if known and (forgotten := _too_many(world, known, most_topics)):
        last = max(at for at, decision in enumerate(taught) if decision.lessons)
        taught[last] = changed(taught[last], forgotten=forgotten)
    return taught


def _values(world: World, write: TaskWrite) -> Iterator[tuple[Topic, float]]:
    before, after = world.tasks.get(write.task.id), write.task
    if before is None or not before.subject or not before.is_active:
        return
    for rank, succeeded in _ends(before, write):
        peaks: dict[str, int] = {}
        for lease in world.leases_of(before):
            kind = world.books[lease.device].device.kind
            peak = world.learned.peaks.get(lease.key, 0)
            if lease.rank == rank and (succeeded or peak > lease.mb):
                peaks[kind] = max(peak, peaks.get(kind, 0))
        for kind in sorted(peaks):
            if peaks[kind] > 0:  # else the run was over before its device was measured
                yield Topic(before.tenant, before.subject, kind, What.GPU_MB), peaks[kind]
    if write.what is Move.SUCCEEDED and (seconds := _run_seconds(after)) is not None:
        yield Topic(before.tenant, before.subject, kind_of_run(world, before), What.SECONDS), seconds


def _ends(before: Task, write: TaskWrite) -> Iterator[tuple[int, bool]]:
    """(rank, whether it did its work) of each run that ends with this.

    A rank that ends well after notice was given to its gang has done its work only if the gang has.
    """
    succeeded = write.what is Move.SUCCEEDED
    if not before.members:
        if succeeded or write.what in _OTHER_ENDS:
            yield 0, succeeded
        return
    at_work = succeeded or before.state is not TaskState.STOPPING
    ended = {member.rank: member.state for member in write.task.members if member.has_ended}
    for member in before.members:
        state = ended.get(member.rank)
        is_over = state is not None or not write.task.members  # of one that waits again all are
        if is_over and not member.has_ended:
            yield member.rank, at_work and state is MemberState.SUCCEEDED


def kind_of_run(world: World, task: Task) -> str:
    """Of its devices, by which run times are told apart; empty if it has none."""
    return min((world.books[lease.device].device.kind for lease in world.leases_of(task)), default="")


def _run_seconds(task: Task) -> float | None:
    """How long the whole work took; None if nobody knows."""
    if task.started_at is None or task.finished_at is None:
        return None
    resumed = task.checkpoint_at is not None and task.checkpoint_at < task.started_at
    return None if resumed else round(task.finished_at - task.started_at, 3)


def _too_many(world: World, learning: dict[Topic, Sketch], most_topics: int) -> tuple[Topic, ...]:
    known = world.learned.sketches
    excess = len(known) + sum(topic not in known for topic in learning) - most_topics
    idle = (topic for topic in known if topic not in learning)
    return tuple(islice(idle, max(0, excess)))
