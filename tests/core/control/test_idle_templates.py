"""Idle templates: each idle device has work of one of them, shared by weight, and none starves."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from gpubroker_server.core.control.fleet import FleetControl, FleetRules
from gpubroker_server.core.control.idle import IdleRules
from gpubroker_server.core.control.idle_templates import (
    MAX_WAITING,
    NAME_PREFIX,
    IdleFill,
    Seat,
    Template,
    TemplateSeen,
    missing,
    seats,
)
from gpubroker_server.core.domain.device import NodeSample
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, Seconds
from gpubroker_server.core.world.background import BackgroundRoom
from gpubroker_server.core.world.world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_demand, a_device, a_node, a_sample, a_task, a_world, holding, key

N1 = NodeName("n1")


def a_template(name: str = "a", weight: int = 1, max_running: int = 100, **demand: Any) -> Template:
    return Template(name, a_demand(**(demand or {"gpus": 1})), weight, max_running)


def some_seats(count: int, *templates: Template, per_node: int = 8) -> list[Seat]:
    return [Seat(f"gpu{n:03}", NodeName(f"n{n // per_node:03}"), templates) for n in range(count)]


def fill(
    count: int,
    *templates: Template,
    alive: Mapping[str, int] | None = None,
    waiting: Mapping[str, int] | None = None,
) -> Counter[str]:
    return missing(some_seats(count, *templates), alive or {}, waiting or {}, {})


templates_of_any_kind = st.lists(
    st.builds(
        lambda weight, most, gpus: (weight, most, gpus),
        st.integers(1, 20), st.integers(1, 30), st.integers(1, 3),
    ),
    max_size=5,
)  # fmt: skip


@given(templates_of_any_kind, st.integers(0, 40), st.lists(st.integers(0, 6), min_size=5, max_size=5))
def test_no_template_gets_more_than_it_may_and_no_seat_is_given_twice(
    given_templates: list[tuple[int, int, int]], count: int, alive: list[int]
) -> None:
    templates = [
        a_template(str(n), weight, most, gpus=gpus) for n, (weight, most, gpus) in enumerate(given_templates)
    ]
    have = {template.name: number for template, number in zip(templates, alive, strict=False)}
    more = missing(some_seats(count, *templates), have, {}, {})
    assert sum(more[one.name] * one.seats for one in templates) <= count
    for one in templates:
        assert have[one.name] + more[one.name] <= max(one.max_running, have[one.name])
    singles = [one for one in templates if one.seats == 1]
    if any(have[one.name] + more[one.name] < one.max_running for one in singles):
        assert sum(more[one.name] * one.seats for one in templates) == count  # no seat is left empty
    assert more == missing(some_seats(count, *templates), have, {}, {})


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, MAX_WAITING))
def test_each_gets_at_least_the_whole_part_of_its_share_by_weight(weights: list[int], count: int) -> None:
    templates = [a_template(str(n), weight) for n, weight in enumerate(weights)]
    more = fill(count, *templates)
    assert sum(more.values()) == count
    for one in templates:
        assert more[one.name] >= count * one.weight // sum(weights)


@settings(max_examples=10)
@given(st.lists(st.integers(1, 1000), min_size=2, max_size=4))
def test_one_seat_is_shared_by_weight_as_time_goes_by(weights: list[int]) -> None:
    world = a_world(a_node(), a_device("gpu0"))
    control = IdleFill(2.0)
    control.templates = [a_template(str(n), weight) for n, weight in enumerate(weights)]
    control.find(world, [key("gpu0")])
    turns: Counter[str] = Counter()
    for n in range(2000):  # tasks of 30 s
        world.measure([a_sample("gpu0", NOW + 30.0 * n)])
        control.look(world, {key("gpu0")}, Instant(NOW + 30.0 * n))
        [wanted] = [one.name for one in control.seen if one.missing]
        turns[wanted] += 1
    for number, weight in enumerate(weights):
        share = turns[str(number)] / turns.total()
        assert share > 0.0
        if min(weights) * 10 > max(weights):
            assert abs(share - weight / sum(weights)) < 0.05


def test_a_task_that_waits_already_comes_first_and_counts() -> None:
    one, other = a_template("a"), a_template("b", weight=100)
    assert fill(1, one, other, alive={"a": 1}, waiting={"a": 1}) == {}
    assert fill(2, one, other, alive={"a": 1}, waiting={"a": 1}) == {"b": 1}


def test_a_task_of_several_gpus_needs_them_on_one_node() -> None:
    pair = a_template("pair", gpus=2)
    assert missing(some_seats(7, pair, per_node=3), {}, {}, {}) == {"pair": 2}
    assert missing(some_seats(2, pair, per_node=1), {}, {}, {}) == {}


def test_seats_are_for_the_templates_that_fit_there() -> None:
    world = a_world(a_node("n1", labels=(("zone", "east"),)), a_device("gpu0"), a_node("n2"))
    large, small = a_template("large", gpu_mb=90 * GIB), a_template("small", gpu_mb=10 * GIB)
    cpu = a_template("cpu", cpu=1.0)
    found = seats(world, [key("gpu0"), "n2", "gone"], [large, small, cpu])
    assert [(seat.name, seat.node, [one.name for one in seat.takers]) for seat in found] == [
        (key("gpu0"), "n1", ["small"]), ("n2", "n2", ["cpu"]),
    ]  # fmt: skip
    assert seats(world, [key("gpu0")], [large]) == []


def test_it_knows_its_tasks_and_numbers_the_next_one() -> None:
    first, other = a_task("t1", name="idle/a", priority=0), a_task("t2", name="b", priority=0)
    lease = a_task("t3", name="idle/a", answered_by="m")
    world = a_world(a_node(), a_device("gpu0"), first, other)
    control = IdleFill(2.0)
    control.templates = [a_template("a")]
    for task in (first, other, lease):
        control.note(task, is_new=True)
    control.find(world, [key("gpu0")])
    control.look(world, {key("gpu0")}, Instant(NOW))
    assert control.seen == (TemplateSeen("a", waiting=1, number=1, missing=0),)
    ended = a_world(a_node(), a_device("gpu0"))
    control.look(ended, {key("gpu0")}, Instant(NOW))
    assert control.seen == (TemplateSeen("a", number=1, missing=1),)
    control.look(ended, set(), Instant(NOW))  # it is not idle any more
    assert control.seen == (TemplateSeen("a", number=1),)


RULES = FleetRules(idle=IdleRules(0.05, Seconds(60.0)), idle_check_seconds=Seconds(20.0))


class Course:
    """A GPU over time, under fleet control."""

    def __init__(self) -> None:
        self.control = FleetControl(RULES, Policy())
        self.control.fill.templates = [a_template("a")]
        self.now = NOW

    def look(
        self, world: World, seconds: float, *, use: float, cpu: float = 0.0, used_mb: int = 0
    ) -> TemplateSeen:
        until = self.now + seconds
        while self.now < until:
            self.now = Instant(self.now + 2.0)
            world.measure([a_sample("gpu0", self.now, utilization=use, used_mb=used_mb)])
            world.node_samples[N1] = NodeSample(N1, self.now, cpu, Mib(10), Mib(5))
            self.control.step(world, {}, self.now)
        return self.control.seen.templates[0]


def test_the_next_leader_asks_for_no_task_before_it_has_looked() -> None:
    course = Course()
    assert course.look(a_gpu_with(), 120.0, use=0.0).missing == 1
    assert FleetControl(RULES, Policy(), course.control.seen).seen.templates == ()


def a_gpu_with(*priorities: int) -> World:
    runs = [
        holding(
            a_task(f"t{n}", name=f"{NAME_PREFIX}a", priority=priority),
            "gpu0",
            mb=10 * GIB,
            state=TaskState.RUNNING,
        )
        for n, priority in enumerate(priorities)
    ]
    return a_world(a_node(), a_device("gpu0"), *runs)


def test_gpu_stays_idle_while_a_template_fills_it_and_after_its_task_ends() -> None:
    course = Course()
    assert course.look(a_gpu_with(), 50, use=0.0).missing == 0
    assert course.look(a_gpu_with(), 40, use=0.0).missing == 1
    filled = a_gpu_with(0)
    course.control.fill.note(filled.tasks[min(filled.tasks)], is_new=True)
    assert course.look(filled, 200, use=1.0, cpu=1.0) == TemplateSeen("a", running=1, number=1)
    assert [one.name for one in course.control.seen.idle] == ["n1", key("gpu0")]
    assert course.look(a_gpu_with(), 2, use=1.0).missing == 1  # its last sample
    assert course.look(a_gpu_with(), 20, use=1.0).missing == 0  # not ours, then
    assert course.look(a_gpu_with(), 20, use=0.0).missing == 0


def test_nothing_is_submitted_where_nothing_may_start() -> None:
    free = a_gpu_with()
    assert Course().look(free, 100, use=0.0).missing == 1
    free.control(BackgroundRoom({"all": 0}, {N1: ("all",)}), {})
    assert Course().look(free, 100, use=0.0).missing == 0
    free.control(BackgroundRoom(), {N1: "/scratch is full"})
    assert Course().look(free, 100, use=0.0).missing == 0
    for closed in (a_node(cordoned=True), a_node(ready=False)):
        node = a_world(closed, a_device("gpu0"))
        assert Course().look(node, 100, use=0.0).missing == 0
    assert Course().look(a_gpu_with(), 100, use=0.0, used_mb=80 * GIB).missing == 0  # others use it


def test_nothing_is_submitted_for_a_gpu_that_is_not_measured_any_more() -> None:
    course, world = Course(), a_gpu_with()
    assert course.look(world, 100, use=0.0).missing == 1
    for seconds, expected in ((4.0, 1), (86_400.0, 0)):
        course.control.step(world, {}, Instant(course.now + seconds))
        assert [one.missing for one in course.control.seen.templates] == [expected]


def test_a_gpu_whose_model_makes_room_for_all_is_filled() -> None:
    course = Course()
    assert course.look(a_gpu_with(-1), 100, use=0.0).missing == 1
    assert course.look(a_gpu_with(-1, 0), 100, use=1.0).missing == 0
    assert key("gpu0") in [one.name for one in course.control.seen.idle]


def test_the_cpus_of_a_node_are_filled_whether_its_gpus_may_be_or_not() -> None:
    course, world = Course(), a_gpu_with()
    course.control.fill.templates = [a_template("a", cpu=1.0)]
    world.control(BackgroundRoom({"all": 0}, {N1: ("all",)}), {})
    assert course.look(world, 100, use=1.0).missing == 1


def test_template_whose_tasks_fail_pauses_longer_until_one_succeeds() -> None:
    world, control = a_world(), IdleFill(2.0)
    control.templates = [a_template("bad"), a_template("good", weight=1000)]
    failed = a_task("t", name="idle/bad", priority=0, state=TaskState.FAILED)
    submitted = Counter[str]()

    def look(seconds: float) -> TemplateSeen:
        now = Instant(NOW + seconds)
        world.measure([a_sample("gpu0", now)])
        control.find(world, [key("gpu0")])
        control.look(world, {key("gpu0")}, now)
        for one in control.seen:
            submitted[one.name] += one.missing
            if one.name == "bad" and one.missing:
                control.end(failed, now)
                control.end(failed, now)  # one that was submitted before it
        return control.seen[0]

    for n in range(1800):
        look(2.0 * n)
    assert submitted["good"] > 1700
    control.templates = [a_template("bad")]
    before = submitted["bad"]
    for n in range(1800, 5400):
        look(2.0 * n)
    assert submitted["bad"] - before < 20
    control.end(failed, Instant(NOW + 20_000.0))
    assert look(20_000.0).paused_until == NOW + 20_600.0
    control.end(replace(failed, state=TaskState.CANCELLED), Instant(NOW + 20_000.0))
    control.end(replace(failed, name="other", state=TaskState.SUCCEEDED), Instant(NOW + 20_000.0))
    assert look(20_000.0).paused_until is not None
    control.end(replace(failed, state=TaskState.SUCCEEDED), Instant(NOW + 20_000.0))
    assert look(20_000.0) == TemplateSeen("bad", missing=1)


def test_no_more_than_some_tasks_of_a_template_wait_at_a_time() -> None:
    assert fill(1000, a_template()) == {"a": MAX_WAITING}
    waits = {"a": MAX_WAITING - 4}
    assert fill(1000, a_template(), alive=waits, waiting=waits) == {"a": 4}


def test_seats_of_one_node_need_not_be_alike() -> None:
    pair, single = a_template("pair", gpus=2), a_template("single", max_running=1)
    unlike = [Seat("gpu0", N1, (pair,)), Seat("gpu1", N1, (pair, single)), Seat("gpu2", N1, (single,))]
    assert missing(unlike, {}, {}, {"pair": 99.0}) == {"single": 1}
    assert missing(unlike, {}, {}, {"single": 99.0}) == {"pair": 1, "single": 1}


def test_other_work_makes_it_busy_and_nothing_is_submitted_beside_it() -> None:
    for priorities in ((50,), (0, 50), (-1,)):
        course = Course()
        course.look(a_gpu_with(), 100, use=0.0)
        assert course.look(a_gpu_with(*priorities), 30, use=1.0, cpu=1.0).missing == 0
        assert course.control.seen.idle == ()
