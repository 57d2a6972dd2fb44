"""How large a model is, by what its device has more in use when it is there."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.estimates import What
from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.lease import HolderKind, LeaseState
from gpubroker_server.core.domain.model_orders import IndexedModel, ModelState, ServerIndex
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Mib, Seconds
from gpubroker_server.core.lifecycle.learning import (
    WARM_SECONDS,
    ModelMeter,
    added,
    learned_mb,
    size_accuracies,
    unmeasurable,
)
from gpubroker_server.core.lifecycle.model_lifecycle import seen
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import (
    GIB,
    NOW,
    Holding,
    a_device,
    a_sample,
    a_sketch,
    a_task,
    a_world,
    commit,
    holding,
    submit,
)
from tests.core.served import POLICY, a_model, ask, at, index, plan, the

WARM = 5.0 + WARM_SECONDS
RESERVED = LeaseState.RESERVED


def a_loaded(model: str) -> Holding:
    """A model that is there."""
    made = holding(a_model(model), "gpu0", mb=GIB)
    return replace(made, leases=tuple(replace(one, holder_kind=HolderKind.MODEL) for one in made.leases))


class Scene:
    """A model of 50 GiB on a device of 80, whatever else is there."""

    def __init__(self, *parts: object, looked: bool = False, **fields: object) -> None:
        """`looked`: also just before its admission."""
        self.world: World = a_world(*parts)  # type: ignore[arg-type]
        self.meter = ModelMeter()
        submit(self.world, a_model(**fields))  # type: ignore[arg-type]
        if looked:
            self.look(0.5)
        plan(self.world, 1.0)

    def look(self, seconds: float, *but_not: str) -> list[Decision]:
        decisions = self.meter.measure(self.world, at(seconds), but_not)
        commit(self.world, decisions, at(seconds))
        return decisions

    def measure(
        self, seconds: float, gib: int, by_holder: dict[str, Mib] | None = None, **fields: object
    ) -> None:
        known = by_holder or {}
        used = Mib(gib * GIB)
        foreign = Mib(used - sum(known.values()))
        facts = {"used_mb": used, "foreign_mb": foreign, "by_holder": known, **fields}
        self.world.measure([a_sample("gpu0", at(seconds), **facts)])

    def begin(self, gib: int = 40, versions: tuple[str, ...] = (), **fields: object) -> list[Decision]:
        """It is loaded, and measured since."""
        self.look(1.5)
        index(self.world, {"llm": ModelState.READY}, 5.0, versions=versions)
        assert self.look(5.5) == [], "it was not measured since"
        self.measure(6.0, gib, **fields)  # type: ignore[arg-type]
        return self.look(6.5)

    def load(self, gib: int = 40, **fields: object) -> list[Decision]:
        """And for as long as its first requests count."""
        assert self.begin(gib, **fields) == [], "it may need more yet"  # type: ignore[arg-type]
        return self.look(WARM)

    @property
    def learned(self) -> Mib | None:
        return self.of()

    def of(self, *versions: str) -> Mib | None:
        return learned_mb(self.world, "default", "llm", {"H100", "other"}, 0.25, versions)


def test_a_models_size_is_the_growth_of_its_devices_use_since_its_load() -> None:
    scene = Scene()
    assert scene.learned is None
    [decision] = scene.load(40)
    [lesson] = decision.lessons
    assert (lesson.topic.subject, lesson.topic.kind, lesson.topic.what) == ("model llm", "H100", What.GPU_MB)
    assert scene.learned == pytest.approx(50 * GIB, rel=0.03)
    assert scene.look(WARM + 1) == [], "once for each load"


def test_growth_during_a_models_first_requests_is_its_own() -> None:
    scene = Scene()
    assert scene.begin(40) == []
    for seconds, gib in ((8.0, 48), (12.0, 44)):
        scene.measure(seconds, gib)
        assert scene.look(seconds) == []
    assert len(scene.look(WARM)) == 1
    scene.measure(WARM + 2, 70)
    assert scene.look(WARM + 3) == [], "that is for the margin"
    assert scene.learned == pytest.approx(1.25 * 48 * GIB, rel=0.03)


@pytest.mark.parametrize("what", ["somebody comes", "it leaves", "it vanishes"])
def test_when_another_holder_arrives_the_peak_until_then_counts(what: str) -> None:
    scene = Scene()
    assert scene.begin(40) == []
    match what:
        case "somebody comes":
            submit(scene.world, a_task("other", gpu_mb=5 * GIB))
            plan(scene.world, 7.0)
        case "it leaves":
            ask(scene.world, "cancel", 7.0)
        case _:
            index(scene.world, {"llm": ModelState.ABSENT}, 7.0)
    scene.measure(8.0, 70)
    assert len(scene.look(8.5)) == 1
    assert scene.learned == pytest.approx(50 * GIB, rel=0.03)
    assert scene.look(WARM) == []


def test_model_loaded_to_be_measured_counts_all_memory_until_it_leaves() -> None:
    scene = Scene(terms={"measured": True})
    assert scene.begin(40) == []
    assert scene.look(WARM) == []
    scene.measure(WARM + 2, 60)
    assert scene.look(WARM + 3) == []
    ask(scene.world, "cancel", WARM + 4)
    assert len(scene.look(WARM + 4)) == 1
    assert scene.learned == pytest.approx(1.25 * 60 * GIB, rel=0.03)


@pytest.mark.parametrize(
    ("parts", "sample", "why"),
    [
        ([a_device(simulated=False)], {}, ""),
        ([a_device(simulated=True)], {}, "simulated"),
        ([a_device(simulated=False)], {"at": NOW - 7}, "not measured now"),
        ([a_device(simulated=False), holding(a_task("run"), "gpu0", mb=GIB)], {}, ""),
        (
            [a_device(simulated=False), holding(a_task("run"), "gpu0", mb=GIB)],
            {"foreign_mb": None},
            "from run;",
        ),
        ([a_device(simulated=False), a_loaded("bert"), a_loaded("asr")], {}, "told from asr, bert; have"),
        (
            [a_device(simulated=False), holding(a_task("run"), "gpu0", mb=GIB, lease_state=RESERVED)],
            {},
            "something else comes or goes",
        ),
        (
            [a_device(simulated=False), holding(a_task("run"), "gpu0", mb=GIB, state=TaskState.STOPPING)],
            {},
            "something else comes or goes",
        ),
    ],
)
def test_where_a_model_could_not_be_told_apart_it_is_not_measured(
    parts: list[Any], sample: dict[str, Any], why: str
) -> None:
    world = a_world(*parts)
    [ledger] = world.ledgers.values()
    ledger.sample = a_sample("gpu0", **sample)
    found = unmeasurable(world, ledger, at(0), Seconds(2.0))
    assert why in found
    assert bool(why) is bool(found)


def test_a_value_that_was_learned_since_is_found_among_others() -> None:
    before = a_sketch([1000, 2000, 2000])
    assert added(before, before) is None
    for value in (500, 2000, 4000):
        assert added(before, before.add(value)) == pytest.approx(value, rel=0.02)


def test_beside_another_model_only_the_load_counts() -> None:
    scene = Scene()
    submit(scene.world, a_model("other", gpu_mb=20 * GIB))
    index(scene.world, {"llm": ModelState.READY}, 2.0)
    scene.measure(3.0, 40)
    plan(scene.world, 3.5)
    scene.look(4.0)
    index(scene.world, {"llm": ModelState.READY, "other": ModelState.READY}, 5.0)
    scene.measure(6.0, 55)
    [decision] = scene.look(6.5)
    assert decision.lessons[0].topic.subject == "model other", "their requests are one process's"


def test_a_load_teaches_nothing_if_another_holder_came_and_went_meanwhile() -> None:
    scene = Scene()
    scene.look(1.5)
    submit(scene.world, a_model("other", gpu_mb=20 * GIB))
    plan(scene.world, 2.0)
    scene.look(2.5)
    ask(scene.world, "cancel", 3.0, task="other")
    index(scene.world, {"llm": ModelState.LOADING}, 3.5)
    scene.look(4.0)
    index(scene.world, {"llm": ModelState.READY}, 5.0)
    scene.measure(6.0, 55)
    assert scene.look(6.5) == []
    assert scene.look(WARM) == []
    assert scene.learned is None


def test_each_version_of_a_model_has_its_own_size() -> None:
    scene = Scene()
    scene.begin(40, versions=("1", "3"))
    [decision] = scene.look(WARM)
    assert decision.lessons[0].topic.subject == "model llm/1,3"
    other = Scene()
    other.world.learned = scene.world.learned
    other.begin(60, versions=("4",))
    other.look(WARM)
    assert scene.of("1", "3") == pytest.approx(50 * GIB, rel=0.03)
    assert scene.of("4") == pytest.approx(75 * GIB, rel=0.03)
    assert scene.of("5") == scene.of() == scene.of("4"), "the last one is the nearest"
    assert learned_mb(scene.world, "default", "ll", {"H100"}, 0.25) is None
    [record] = size_accuracies(other.world)
    assert record.ratio == pytest.approx(50 / 60, rel=0.03)


def test_a_run_with_constant_use_does_not_disturb_the_measurement() -> None:
    run = holding(a_task("run", gpu_mb=10 * GIB), "gpu0")
    scene = Scene(run)
    scene.world.measure(
        [a_sample("gpu0", at(1.0), used_mb=Mib(10 * GIB), by_holder={"run:1": Mib(10 * GIB)})]
    )
    scene.load(50, by_holder={"run:1": Mib(10 * GIB)})
    assert scene.learned == pytest.approx(50 * GIB, rel=0.03)


@pytest.mark.parametrize("change", ["grew", "came", "left", "unlisted"])
def test_a_load_during_which_anything_else_changed_teaches_nothing(change: str) -> None:
    scene = Scene(holding(a_task("run", gpu_mb=10 * GIB), "gpu0"))
    scene.look(1.5)
    index(scene.world, {"llm": ModelState.READY}, 5.0)
    if change == "came":
        submit(scene.world, a_task("other", gpu_mb=5 * GIB))
        plan(scene.world, 5.5)
    if change == "left":
        ask(scene.world, "cancel", 5.5, task="run")
    used = {"run:1": Mib((12 if change == "grew" else 0) * GIB)}
    scene.measure(6.0, 50, used, **({"foreign_mb": None} if change == "unlisted" else {}))
    assert scene.look(6.5) == []
    assert scene.look(WARM) == []
    assert scene.learned is None


def test_driver_noise_is_not_a_size() -> None:
    assert Scene().load(0) == []


def test_a_sample_after_the_admission_is_no_baseline() -> None:
    scene = Scene()
    scene.measure(1.2, 5)
    assert scene.load() == []


def test_load_is_measured_though_a_sample_came_before_the_first_look_at_it() -> None:
    scene = Scene(looked=True)
    scene.measure(1.2, 5)
    assert len(scene.load(40)) == 1
    assert scene.learned == pytest.approx(50 * GIB, rel=0.03)


def test_load_that_was_over_at_the_first_look_after_admission_is_measured() -> None:
    scene = Scene(looked=True)
    index(scene.world, {"llm": ModelState.READY}, 1.4)
    scene.measure(1.45, 40)
    assert scene.look(1.5) == []
    assert len(scene.look(WARM)) == 1
    assert scene.learned == pytest.approx(50 * GIB, rel=0.03)


def test_a_load_that_was_over_before_this_leader_looked_teaches_nothing() -> None:
    scene = Scene()
    index(scene.world, {"llm": ModelState.READY}, 1.4)
    scene.measure(1.45, 40)
    assert scene.look(1.5) == []
    assert scene.look(WARM) == []


def test_a_model_that_was_loaded_by_hand_teaches_nothing() -> None:
    scene = Scene()
    index(scene.world, {"llm": ModelState.READY}, 2.0)
    submit(scene.world, a_model("by hand", gpu_mb=GIB))
    scene.measure(3.0, 20)
    assert scene.look(3.1) == []
    index(scene.world, {"by hand": ModelState.READY, "llm": ModelState.READY}, 3.2)
    assert scene.world.leases_of(the(scene.world, "by hand"))
    scene.measure(4.0, 30)
    assert scene.look(4.1) == []
    scene.measure(5.0, 30)
    assert scene.look(3.2 + WARM) == []


def test_no_measurement_begins_beside_a_holder_that_arrives_or_leaves() -> None:
    scene = Scene(holding(a_task("run", gpu_mb=10 * GIB), "gpu0"))
    ask(scene.world, "cancel", 1.2, task="run")
    assert scene.load() == []


def test_models_on_several_gpus_or_none_teach_nothing() -> None:
    two = Scene(a_device("gpu0"), a_device("gpu1"), gpus=2, gpu_mb=10 * GIB)
    assert two.load() == []
    assert Scene(gpus=0, gpu_mb=None).load() == []


def test_a_failed_load_is_forgotten_and_other_decisions_come_first() -> None:
    scene = Scene()
    scene.look(1.5)
    index(scene.world, {"llm": ModelState.READY}, 5.0)
    scene.measure(6.0, 40)
    assert scene.look(WARM, "llm") == []
    assert len(scene.look(WARM + 1)) == 1
    gone = Scene()
    gone.look(1.5)
    ask(gone.world, "cancel", 2.0)
    assert gone.look(2.5) == []
    assert gone.meter.measure(gone.world, at(3.0)) == []


@pytest.mark.parametrize(("took", "ratio", "enough"), [(40, 1.25, 1.0), (25, 2.0, 1.0), (60, 0.83, 0.0)])
def test_leases_are_compared_with_measured_sizes(took: int, ratio: float, enough: float) -> None:
    scene = Scene()
    assert size_accuracies(scene.world) == []
    scene.look(1.5)
    index(scene.world, {"llm": ModelState.READY}, 5.0)
    assert size_accuracies(scene.world) == [], "nobody has measured it yet"
    scene.measure(6.0, took)
    scene.look(WARM)
    [record] = size_accuracies(scene.world)
    assert (record.server, record.enough) == ("main", enough)
    assert record.ratio == pytest.approx(ratio, rel=0.03)


def test_model_loaded_by_two_servers_at_once_is_learned_from_both_loads() -> None:
    scene = Scene(a_device("gpu0"), a_device("gpu1"))
    scene.look(1.1)
    submit(scene.world, replace(a_model("twin"), holder=Model("other", "llm")))
    plan(scene.world, 1.2)
    scene.look(1.5)
    index(scene.world, {"llm": ModelState.READY}, 5.0)
    there = ServerIndex("other", at(5.0), {"llm": IndexedModel("llm", ModelState.READY)})
    commit(scene.world, seen(scene.world, there, at(5.0), POLICY), at(5.0))
    full = {"used_mb": Mib(60 * GIB), "foreign_mb": Mib(60 * GIB)}
    scene.world.measure([a_sample(gpu, at(6.0), **full) for gpu in ("gpu0", "gpu1")])
    first, second = scene.look(WARM)
    assert [one.lessons[0].sketch.n for one in (first, second)] == [1, 2]
