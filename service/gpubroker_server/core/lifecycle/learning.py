"""Sizes and durations that are learned from runs and model loads.

A model's size is the greatest increase in its device's memory use, once the model is loaded and answers its
first requests. A load during which anything else on the device changes teaches nothing.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from math import ceil, inf
from statistics import median

from msgspec import Struct, field
from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import Decision, TaskWrite, write_move
from gpubroker_server.core.domain.device import DeviceSample
from gpubroker_server.core.domain.estimates import Observation, Sketch, SketchKey, What
from gpubroker_server.core.domain.holders import Gang, MemberState, WorkerSeat
from gpubroker_server.core.domain.lease import HOLDERS_WITH_RUNS, HolderKind, LeaseState
from gpubroker_server.core.domain.task import Move, Task, TaskState, members_of, model_of
from gpubroker_server.core.domain.units import DeviceKey, Fence, Instant, Mib, Seconds, TaskId
from gpubroker_server.core.world.ledger import NOISE_DIVISOR, DeviceLedger
from gpubroker_server.core.world.world import World

FILLED_SHARE = 0.7
"""The share (0 to 1) of a whole device above which a run's use teaches no size: frameworks take most of what
a device has (JAX 75 %, vLLM 90 %), whatever they need."""

MAX_TOPICS = 10_000
"""The number of topics above which the least recently updated are forgotten."""

_OTHER_ENDS = frozenset({Move.REQUEUED, Move.FAILED, Move.CANCELLED, Move.EXPIRED})


def learn(
    world: World, decisions: Sequence[Decision], now: Instant, most_topics: int = MAX_TOPICS
) -> list[Decision]:
    """Add to each decision of a batch what is learned from the runs that it ends.

    A run that succeeded teaches its peak use of each kind of device, and its duration unless it resumed
    earlier work. A run that ended otherwise teaches its peak use only where that exceeded its lease, so that
    later runs lease enough. Each rank of a gang teaches its use when the rank ends, the gang its duration.
    """
    sketches: dict[SketchKey, Sketch] = {}
    observed: list[Decision] = []
    for decision in decisions:
        lessons: list[Observation] = []
        for write in decision.tasks:
            for topic, value in _values(world, write):
                sketch = sketches.get(topic) or world.learned.sketch(topic)
                sketches[topic] = sketch.add(value)
                lessons.append(Observation(topic, value, sketches[topic], now))
        observed.append(replace(decision, lessons=tuple(lessons)) if lessons else decision)
    if sketches and (forgotten := _too_many(world, sketches, most_topics)):
        last = max(index for index, decision in enumerate(observed) if decision.lessons)
        observed[last] = replace(observed[last], forgotten=forgotten)
    return observed


def _values(world: World, write: TaskWrite) -> Iterator[tuple[SketchKey, float]]:
    before, after = world.tasks.get(write.task.id), write.task
    if before is None or not before.subject or not before.is_active:
        return
    for rank, succeeded in _ends(before, write):
        peaks: dict[str, int] = {}
        for lease in world.leases_of(before):
            device = world.ledgers[lease.device].device
            peak = world.learned.peaks.get(lease.key, 0)
            took_all = lease.mb >= device.allocatable_mb and peak >= FILLED_SHARE * lease.mb
            if lease.rank == rank and not took_all and (succeeded or peak > lease.mb):
                peaks[device.kind] = max(peak, peaks.get(device.kind, 0))
        for kind in sorted(peaks):
            if peaks[kind] > 0:  # the peak is 0 if the run was over before its device was measured
                yield SketchKey(before.tenant, before.subject, kind, What.GPU_MB), peaks[kind]
    if isinstance(before.holder, WorkerSeat):
        return  # the duration of a worker tells only how many items it had
    if write.what is Move.SUCCEEDED and (seconds := _run_seconds(after)) is not None:
        yield SketchKey(before.tenant, before.subject, kind_of_run(world, before), What.SECONDS), seconds


def _ends(before: Task, write: TaskWrite) -> Iterator[tuple[int, bool]]:
    """Yield each rank that ends with this write, and whether it succeeded. A rank that ends well after its
    gang was asked to stop has succeeded only if the gang has."""
    succeeded = write.what is Move.SUCCEEDED
    if not isinstance(before.holder, Gang):
        if succeeded or write.what in _OTHER_ENDS:
            yield 0, succeeded
        return
    at_work = succeeded or before.state is not TaskState.STOPPING
    members = members_of(write.task)
    ended = {member.rank: member.state for member in members if member.has_ended}
    for member in before.holder.members:
        state = ended.get(member.rank)
        # A gang that waits again has no members: then all its ranks are over.
        is_over = state is not None or not members
        if is_over and not member.has_ended:
            yield member.rank, at_work and state is MemberState.SUCCEEDED


def kind_of_run(world: World, task: Task) -> str:
    """Return the kind of the task's devices, by which durations are kept; empty if it has none."""
    return min((world.ledgers[lease.device].device.kind for lease in world.leases_of(task)), default="")


def _run_seconds(task: Task) -> float | None:
    """Return the duration of the whole work in seconds; None if it is not known."""
    if task.started_at is None or task.finished_at is None:
        return None
    resumed = task.checkpoint_at is not None and task.checkpoint_at < task.started_at
    return None if resumed else round(task.finished_at - task.started_at, 3)


def _too_many(world: World, learning: dict[SketchKey, Sketch], most_topics: int) -> tuple[SketchKey, ...]:
    sketches = world.learned.sketches
    excess = len(sketches) + sum(topic not in sketches for topic in learning) - most_topics
    idle = (topic for topic in sketches if topic not in learning)
    return tuple(islice(idle, max(0, excess)))


WARM_SECONDS = Seconds(30.0)
"""The time after its load during which growth counts as the model's size: many backends take most of their
working memory with the first requests."""

_DISTINGUISHABLE = HOLDERS_WITH_RUNS | {HolderKind.SERVER}
"""The kinds of other holders whose use can be told from a model's growth: runs are measured by process, and a
server grows only with its models."""


def topic_of(tenant: str, model: str, kind: str, versions: Sequence[str] = ()) -> SketchKey:
    """Return the topic of these versions of a model, loaded together, on a kind of device. Model names have
    no slash, because a model is a folder to its server."""
    subject = f"model {model}/{','.join(versions)}" if versions else f"model {model}"
    return SketchKey(tenant, subject, kind, What.GPU_MB)


def learned_mb(
    world: World,
    tenant: str,
    model: str,
    kinds: Collection[str],
    margin: float,
    versions: Sequence[str] = (),
) -> Mib | None:
    """Return what to lease for the model on any of these kinds, with the margin; None if the model was never
    measured.

    `versions` are those that will be loaded, if known. If they were not measured, the versions that were
    measured last count.
    """
    sketches = (_sketch(world, topic_of(tenant, model, kind, versions)) for kind in sorted(kinds))
    # As for tasks, a size must hold for 95 of 100 loads (ADR 34); the margin is for later, larger requests.
    sizes = [size for sketch in sketches if (size := sketch.quantile(0.95)) is not None]
    return Mib(ceil((1 + margin) * max(sizes))) if sizes else None


def _sketch(world: World, topic: SketchKey) -> Sketch:
    """Return the sketch of the topic, or else that of the versions of the model that were measured last."""
    sketches = world.learned.sketches
    if topic in sketches:
        return sketches[topic]
    model = _of_any_version(topic)
    last_first = reversed(sketches.items())
    return next((sketch for other, sketch in last_first if _of_any_version(other) == model), Sketch())


def _of_any_version(topic: SketchKey) -> tuple[str, ...]:
    return topic.tenant, topic.subject.partition("/")[0], topic.kind, topic.what


class SizeAccuracy(Struct, frozen=True):
    server: str
    ratio: float
    """The median of leased over measured size: 1 is right, 2 is twice too much."""
    enough: float
    """The share (0 to 1) of models with a lease that suffices."""


def unmeasurable(world: World, ledger: DeviceLedger, now: Instant, sample_period_seconds: Seconds) -> str:
    """Return the reason for which a model that is loaded on the device could not be measured there; empty if
    it could."""
    gpu = f"GPU {ledger.device.uuid}"
    if ledger.device.simulated:
        return f"{gpu} is simulated, so nothing measures what a model takes of it"
    if ledger.sample is None or ledger.is_stale(now, sample_period_seconds):
        return f"{gpu} is not measured now; `gpubroker gpus` says since when, and why"
    holders = [holding.lease for holding in ledger.holdings.values()]
    if any(
        holding.lease.state is not LeaseState.HELD or holding.is_leaving
        for holding in ledger.holdings.values()
    ):
        return f"on {gpu} something else comes or goes, and would count as the model's; try again later"
    distinguishable = _DISTINGUISHABLE if ledger.sample.foreign_mb is not None else frozenset[HolderKind]()
    others = sorted(
        world.tasks[TaskId(lease.holder)].name
        for lease in holders
        if lease.holder_kind not in distinguishable
    )
    if others:
        return f"on {gpu} the model could not be told from {', '.join(others)}; have them leave first"
    return ""


def added(before: Sketch, after: Sketch) -> float | None:
    """Return a value that only the later sketch has, within the error of sketches; None if there is none."""
    counts_before = dict(before.counts)
    new = [(bucket, 1) for bucket, count in after.counts if count > counts_before.get(bucket, 0)]
    return Sketch(tuple(new)).quantile(1.0)


def size_accuracies(world: World) -> list[SizeAccuracy]:
    """Return the accuracy of sizes by server. A model's size is the median of its loads."""
    ratios: dict[str, list[float]] = {}
    for task in world.models.live():
        leases = world.leases_of(task)
        if task.state is not TaskState.RUNNING or len(leases) != 1:
            continue
        model, kind = model_of(task), world.ledgers[leases[0].device].device.kind
        topic = topic_of(task.tenant, model.model, kind, model.versions)
        measured_mb = world.learned.sketch(topic).quantile(0.5)
        if measured_mb:
            ratios.setdefault(model.server, []).append(leases[0].mb / measured_mb)
    return [
        SizeAccuracy(server, median(of_server), sum(ratio >= 1 for ratio in of_server) / len(of_server))
        for server, of_server in sorted(ratios.items())
    ]


class _Watch(Struct, frozen=True):
    fence: Fence
    device: DeviceKey
    used_mb: int
    others: dict[str, int]
    """Maps the lease key of each other holder on the device to its measured use in MiB."""
    peak_mb: int = 0
    """The peak use beyond `used_mb` since the load."""
    is_over: bool = False
    """True if later growth would not be the model's, or could not be told from that of others."""


class _Look(Struct, frozen=True):
    at: Instant = Instant(inf)
    samples: Mapping[DeviceKey, DeviceSample | None] = field(default_factory=dict)
    """The sample of each device at the instant `at`. It is kept because at the next look the newest sample of
    a device may date from after an admission, and then says nothing about the time before it."""


class ModelMeter:
    """Measures the loads of models. The meter lives in the memory of one leader: a load that this leader did
    not see from the beginning teaches nothing."""

    def __init__(self) -> None:
        self._watches: dict[TaskId, _Watch] = {}
        self._last = _Look()

    def measure(self, world: World, now: Instant, excluded: Collection[str] = ()) -> list[Decision]:
        """Return decisions with what was learned since the last look. `excluded` are tasks with other
        decisions in this batch."""
        watches_before, self._watches = self._watches, {}
        decisions: list[Decision] = []
        sketches: dict[SketchKey, Sketch] = {}
        for task in world.models.live():
            watch = watches_before.get(task.id)
            if watch is None or watch.fence != task.fence:
                watch = _before(world, task, self._last)
            if watch is None:
                continue
            watch = _updated(world, task, watch, now)
            if task.id in excluded or not watch.is_over or task.state is TaskState.ADMITTED:
                self._watches[task.id] = watch
            else:
                decisions += _lessons(world, task, watch, sketches, now)
        self._last = _Look(now, {key: ledger.sample for key, ledger in world.ledgers.items()})
        return decisions


def _before(world: World, task: Task, last: _Look) -> _Watch | None:
    """Return the watch of a load, if the device was measured before it and no other holder is arriving or
    leaving. A quick load may be over at the first look since its admission."""
    leases = world.leases_of(task)
    if len(leases) != 1 or task.admitted_at is None:
        return None
    # A model that the server already had was adopted: it started when it was admitted.
    was_loaded = task.state is TaskState.RUNNING and task.started_at != task.admitted_at
    if task.state is not TaskState.ADMITTED and not (was_loaded and last.at <= task.admitted_at):
        return None
    device = leases[0].device
    others = _others(world.ledgers[device], task)
    for sample in (world.ledgers[device].sample, last.samples.get(device)):
        if sample is not None and sample.at <= task.admitted_at and others is not None:
            return _Watch(task.fence, device, sample.used_mb, others)
    return None


def _others(ledger: DeviceLedger, task: Task) -> dict[str, int] | None:
    """Return the measured use of each other holder; None if one of them is arriving or leaving."""
    others = {key: holding for key, holding in ledger.holdings.items() if holding.lease.holder != task.id}
    if any(holding.lease.state is not LeaseState.HELD or holding.is_leaving for holding in others.values()):
        return None
    return {key: holding.measured_mb for key, holding in others.items()}


def _updated(world: World, task: Task, watch: _Watch, now: Instant) -> _Watch:
    if watch.is_over:
        return watch
    if task.state is TaskState.ADMITTED:
        others = _others(world.ledgers[watch.device], task)
        return (
            watch
            if others is not None and others.keys() <= watch.others.keys()
            else replace(watch, is_over=True)
        )
    if task.state is not TaskState.RUNNING or task.started_at is None:
        return replace(watch, is_over=True)
    ledger = world.ledgers[watch.device]
    if ledger.sample is None or ledger.sample.at <= task.started_at:
        return watch
    if not _is_alone(ledger, task, watch):
        return replace(watch, is_over=True)
    peak_mb = max(watch.peak_mb, ledger.sample.used_mb - watch.used_mb)
    kinds = {ledger.holdings[key].lease.holder_kind for key in watch.others}
    # Beside another model or an external lease only the first sample counts: later growth may be that one's.
    is_warm = now >= task.started_at + WARM_SECONDS and not model_of(task).measured
    return replace(watch, peak_mb=peak_mb, is_over=is_warm or not kinds <= _DISTINGUISHABLE)


def _is_alone(ledger: DeviceLedger, task: Task, watch: _Watch) -> bool:
    others = _others(ledger, task)
    if others is None or others.keys() != watch.others.keys():
        return False
    if others and (ledger.sample is None or ledger.sample.foreign_mb is None):
        return False  # the growth cannot be attributed
    changes_mb = (abs(others[key] - mb) for key, mb in watch.others.items())
    return max(changes_mb, default=0) <= _noise_mb(ledger)


def _noise_mb(ledger: DeviceLedger) -> int:
    return ledger.device.physical_mb // NOISE_DIVISOR


def _lessons(
    world: World, task: Task, watch: _Watch, sketches: dict[SketchKey, Sketch], now: Instant
) -> list[Decision]:
    """Return the decision with what the load has taught, if anything. `sketches` has the sketches as the
    decisions of this look have changed them, and is updated."""
    ledger = world.ledgers[watch.device]
    if watch.peak_mb <= _noise_mb(ledger):
        return []
    model = model_of(task)
    topic = topic_of(task.tenant, model.model, ledger.device.kind, model.versions)
    sketches[topic] = (sketches.get(topic) or world.learned.sketch(topic)).add(watch.peak_mb)
    lesson = Observation(topic, watch.peak_mb, sketches[topic], now)
    return [Decision(task.id, "measured", tasks=(write_move(task, Move.CHANGED),), lessons=(lesson,))]
