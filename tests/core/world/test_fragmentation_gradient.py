"""What usual demands could not use of a node, and where a demand strands the least."""

from collections.abc import Mapping
from random import Random

import pytest
from gpubroker_server.core.world import fragmentation_gradient
from gpubroker_server.core.world.fragmentation_gradient import (
    FragmentationMeasure,
    Inventory,
    Remainder,
    Shape,
    fgd,
    most_copies,
    tasks_lost,
    typical_shapes,
)
from hypothesis import given
from hypothesis import strategies as st

BIG, SMALL = 80, 16
FLEET: Inventory = {"big": (8, BIG), "small": (24, SMALL)}
KINDS = {"big": BIG, "small": SMALL}


def a_shape(amount: int | None = None, *, devices: int = 1, cpu: float = 0, only: str | None = None) -> Shape:
    """So much of each device on any kind that has so much; whole devices without an amount."""
    kinds = [kind for kind, whole in KINDS.items() if only in (None, kind) and (amount or 0) <= whole]
    return Shape(cpu, devices, tuple((kind, amount or KINDS[kind]) for kind in kinds))


CPU_ONLY = Shape(4, 0)

shapes = st.one_of(
    st.builds(a_shape, st.none(), devices=st.integers(1, 4), cpu=st.integers(0, 8)),
    st.builds(a_shape, st.integers(1, BIG), devices=st.integers(1, 3), cpu=st.integers(0, 8)),
    st.builds(Shape, st.integers(1, 16), st.just(0)),
)
mixes = st.dictionaries(shapes, st.integers(1, 50), min_size=1, max_size=6)


@st.composite
def rooms(draw: st.DrawFn) -> Remainder:
    kind = draw(st.sampled_from(sorted(KINDS)))
    left = draw(st.lists(st.integers(0, KINDS[kind]) | st.just(KINDS[kind]), min_size=1, max_size=5))
    return Remainder(draw(st.integers(0, 32)), tuple(left), kind)


def both(mix: Mapping[Shape, int]) -> list[FragmentationMeasure]:
    known = typical_shapes(mix)
    return [fgd(known, BIG), tasks_lost(known, FLEET)]


def fits(shape: Shape, room: Remainder) -> bool:
    amount = dict(shape.amounts).get(room.kind)
    if shape.cpu > room.cpu or (shape.devices and amount is None):
        return False
    return shape.devices == 0 or sum(left >= (amount or 0) for left in room.left) >= shape.devices


def stranded_by_the_paper(shape: Shape, room: Remainder) -> int:
    """F of one task type, as the paper defines it."""
    if not shape.devices or not fits(shape, room):
        return sum(room.left)
    return sum(left for left in room.left if left < dict(shape.amounts)[room.kind])


def copies(shape: Shape, room: Remainder) -> int:
    """One after the other, each on the emptiest devices: that never shuts out a later one."""
    number = 0
    while shape.devices and fits(shape, room):
        emptiest = sorted(range(len(room.left)), key=lambda place: -room.left[place])[: shape.devices]
        amount = dict(shape.amounts)[room.kind]
        left = tuple(had - amount * (place in emptiest) for place, had in enumerate(room.left))
        room, number = Remainder(room.cpu - shape.cpu, left, room.kind), number + 1
    return number


def stranded_by_capacity(shape: Shape, room: Remainder) -> int:
    taken = shape.devices * dict(shape.amounts).get(room.kind, 0)
    return sum(room.left) - copies(shape, room) * taken


@given(mixes, rooms())
def test_the_papers_measure_equals_its_definition(mix: dict[Shape, int], room: Remainder) -> None:
    known = typical_shapes(mix)
    expected = sum(share * stranded_by_the_paper(shape, room) for shape, share in known.items())
    assert fgd(known, BIG).lost(room) == pytest.approx(expected)


@given(shapes.filter(lambda shape: shape.devices and shape.amounts), rooms())
def test_our_measure_counts_stranded_tasks_and_how_many_copies_fit(shape: Shape, room: Remainder) -> None:
    amounts = dict(shape.amounts)
    one = shape.devices * amounts.get(room.kind, min(amounts.values()))
    rare = fragmentation_gradient.scarcity(shape, FLEET)
    stranded = 0.9 * stranded_by_the_paper(shape, room) + 0.1 * stranded_by_capacity(shape, room)
    assert tasks_lost({shape: 1.0}, FLEET).lost(room) == pytest.approx(rare * stranded / one)


@given(mixes, rooms())
def test_the_loss_is_between_zero_and_the_whole(mix: dict[Shape, int], room: Remainder) -> None:
    for measure in both(mix):
        assert 0 <= measure.lost(room) <= measure.whole(room) + 1e-9


@given(mixes, rooms(), st.integers(1, 16))
def test_more_cpu_never_strands_more(mix: dict[Shape, int], room: Remainder, more: int) -> None:
    for measure in both(mix):
        assert measure.lost(room._replace(cpu=room.cpu + more)) <= measure.lost(room) + 1e-9


@given(mixes, rooms(), st.integers(0, 4), st.integers(1, BIG))
def test_more_free_room_never_lowers_what_is_usable(
    mix: dict[Shape, int], room: Remainder, place: int, more: int
) -> None:
    left = list(room.left)
    place %= len(left)
    left[place] = min(KINDS[room.kind], left[place] + more)
    freer = room._replace(left=tuple(left))
    for measure in both(mix):
        usable_before = measure.whole(room) - measure.lost(room)
        assert measure.whole(freer) - measure.lost(freer) >= usable_before - 1e-9


@given(mixes, rooms(), st.randoms(use_true_random=False))
def test_the_order_of_devices_does_not_matter(mix: dict[Shape, int], room: Remainder, chance: Random) -> None:
    left = list(room.left)
    chance.shuffle(left)
    for measure in both(mix):
        assert measure.lost(room._replace(left=tuple(left))) == measure.lost(room)


@given(mixes, shapes, rooms())
def test_devices_are_chosen_exactly_where_the_demand_fits(
    mix: dict[Shape, int], shape: Shape, room: Remainder
) -> None:
    for measure in both(mix):
        spot = measure.spot(shape, room)
        assert (spot is not None) is fits(shape, room)
        if spot is not None:
            assert 0 <= spot.score <= 100
            assert len(set(spot.devices)) == shape.devices
            assert all(room.left[place] >= dict(shape.amounts)[room.kind] for place in spot.devices)


@given(mixes, shapes, st.lists(rooms(), min_size=1, max_size=8))
def test_a_measure_with_cached_answers_answers_like_a_new_one(
    mix: dict[Shape, int], shape: Shape, asked: list[Remainder]
) -> None:
    for used, fresh in zip(both(mix), both(mix), strict=True):
        first = [used.spot(shape, room) for room in asked]
        assert [used.spot(shape, room) for room in asked] == first
        assert [fresh.spot(shape, room) for room in reversed(asked)] == first[::-1]


def test_a_measure_that_drops_its_cache_answers_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragmentation_gradient, "MAX_CACHED", 2)
    measure = tasks_lost(typical_shapes({a_shape(8): 3, a_shape(): 1}), FLEET)
    row = [Remainder(16, (16, 16, left), "small") for left in range(16)]
    assert [measure.spot(a_shape(5), room) for room in row] == [
        measure.spot(a_shape(5), room) for room in row
    ]


@given(mixes, shapes, rooms())
def test_the_unit_does_not_matter(mix: dict[Shape, int], shape: Shape, room: Remainder) -> None:
    def finer(shape: Shape) -> Shape:
        return shape._replace(amounts=tuple((kind, 64 * amount) for kind, amount in shape.amounts))

    def spots(mix: dict[Shape, int], unit: int) -> list[object]:
        fleet = {kind: (count, unit * whole) for kind, (count, whole) in FLEET.items()}
        measures = [fgd(typical_shapes(mix), unit * BIG), tasks_lost(typical_shapes(mix), fleet)]
        asked = finer(shape) if unit > 1 else shape
        return [m.spot(asked, room._replace(left=tuple(unit * left for left in room.left))) for m in measures]

    assert spots(mix, 1) == spots({finer(shape): count for shape, count in mix.items()}, 64)


def test_of_equal_devices_the_lowest_is_taken() -> None:
    measure = tasks_lost(typical_shapes({a_shape(): 1}), FLEET)
    spot = measure.spot(a_shape(devices=2), Remainder(8, (0, SMALL, 4, SMALL, SMALL), "small"))
    assert spot is not None
    assert spot.devices == (1, 3)


def test_a_demand_for_a_share_leaves_whole_devices_whole() -> None:
    measure = tasks_lost(typical_shapes({a_shape(): 1, a_shape(8): 1}), FLEET)
    spot = measure.spot(a_shape(8), Remainder(8, (SMALL, 8, SMALL), "small"))
    assert spot is not None
    assert spot.devices == (1,)


def test_demand_that_fits_anywhere_leaves_rare_devices_to_others() -> None:
    small, large = a_shape(8), a_shape(BIG)
    measure = tasks_lost(typical_shapes({small: 1, large: 1}), FLEET)
    on_rare = measure.spot(small, Remainder(32, (BIG, BIG), "big"))
    on_common = measure.spot(small, Remainder(32, (SMALL, SMALL), "small"))
    assert on_rare is not None
    assert on_common is not None
    assert on_common.score > on_rare.score


def test_only_our_measure_sees_that_idle_devices_without_cpu_are_stranded() -> None:
    task = a_shape(cpu=8)
    room = Remainder(16, (SMALL,) * 8, "small")
    starved = room._replace(cpu=8)
    paper, ours = fgd(typical_shapes({task: 1}), SMALL), tasks_lost(typical_shapes({task: 1}), FLEET)
    assert paper.lost(starved) == paper.lost(room) == 0
    assert ours.lost(starved) > ours.lost(room) > 0


def test_a_placement_that_strands_out_of_all_proportion_scores_nothing() -> None:
    large = Shape(0, 1, (("big", 100_000),))
    measure = tasks_lost(typical_shapes({large: 1}), {"big": (1, 100_000), "tiny": (1_000_000, 1)})
    spot = measure.spot(Shape(0, 1, (("big", 1),)), Remainder(0, (100_000,), "big"))
    assert spot is not None
    assert spot.score == 0


def test_typical_shapes_are_the_most_frequent_that_cover_nearly_all_tasks() -> None:
    often, seldom, rare = a_shape(8), a_shape(), CPU_ONLY
    known = typical_shapes({rare: 4, often: 80, seldom: 16})
    assert list(known) == [often, seldom]
    assert known == {often: 80 / 96, seldom: 16 / 96}


@given(mixes)
def test_typical_shapes_do_not_depend_on_the_order_of_counting(mix: dict[Shape, int]) -> None:
    known = typical_shapes(mix)
    assert list(typical_shapes(dict(reversed(mix.items())))) == list(known)
    assert sum(known.values()) == pytest.approx(1)


def test_without_past_demands_every_fitting_node_is_equally_good() -> None:
    measure = tasks_lost({}, FLEET)
    assert measure.spot(a_shape(8), Remainder(4, (8,), "small")) == measure.spot(
        a_shape(8), Remainder(9, (BIG,), "big")
    )


def test_a_demand_that_no_device_can_host_is_not_typical() -> None:
    measure = tasks_lost(typical_shapes({a_shape(64): 1}), {"small": (4, SMALL)})
    assert measure.whole(Remainder(4, (SMALL,), "small")) == 0


@pytest.mark.parametrize(("slots", "copies"), [([3, 1], 1), ([2, 2], 2), ([5, 0], 0), ([2, 1, 1], 2)])
def test_several_devices_of_a_task_are_different_ones(slots: list[int], copies: int) -> None:
    assert most_copies(slots, 2) == copies
    assert most_copies(slots, 1) == sum(slots)


def test_a_demand_without_devices_fits_where_its_cpu_is() -> None:
    room = Remainder(8, (BIG,), "big")
    for measure in both({a_shape(40, cpu=4): 1}):
        spot = measure.spot(CPU_ONLY, room)
        assert spot is not None
        assert spot.devices == ()
        assert measure.spot(Shape(9, 0), room) is None
