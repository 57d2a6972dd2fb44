import copy
import pickle
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace

import pytest
from gpubroker_server.core.domain.copies import copier, made_at_once, maker
from gpubroker_server.core.domain.demand import Demand, shared
from gpubroker_server.core.domain.units import Mib

from tests.builders import a_task


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: tuple[int, ...] = ()


class Marked:
    __slots__ = ("mark",)


@made_at_once
@dataclass(frozen=True, slots=True)
class Quick(Marked):
    x: int
    y: tuple[int, ...] = ()
    labels: Mapping[str, int] = field(default_factory=dict)


moved = copier(Point)
made_of = maker(Point)


def test_a_copy_differs_in_what_was_named_and_in_nothing_else():
    first = Point(1, (2, 3))
    assert moved(first, x=7) == Point(7, (2, 3))
    assert moved(first) == first == Point(1, (2, 3))


def test_a_copy_is_as_frozen_as_any_other():
    copy = moved(Point(1), x=2)
    assert type(copy) is Point
    with pytest.raises(FrozenInstanceError):
        copy.x = 3  # type: ignore[misc]
    assert replace(copy, x=4) == Point(4)


def test_what_is_no_field_is_refused():
    with pytest.raises(AttributeError):
        moved(Point(1), z=2)


def test_demands_that_equal_each_other_hash_alike_whatever_was_asked_of_them_before():
    one, other = Demand(gpus=1, gpu_mb=Mib(1024)), Demand(gpus=1, gpu_mb=Mib(1024))
    assert hash(one) == hash(one) == hash(other)
    assert one == other
    assert hash(replace(one, gpus=2)) == hash(Demand(gpus=2, gpu_mb=Mib(1024))) != hash(one)
    assert shared(one) is shared(other)


def test_the_hash_of_a_demand_is_none_of_its_fields():
    hash(a_task("t").demand)
    assert "_hash" not in {f.name for f in fields(Demand)}


def test_a_value_made_of_all_its_fields_equals_one_made_the_usual_way():
    made = made_of((1, (2, 3)))
    assert type(made) is Point
    assert made == Point(1, (2, 3))
    with pytest.raises(FrozenInstanceError):
        made.x = 3  # type: ignore[misc]


@pytest.mark.parametrize("values", [(1,), (1, (2,), 3)])
def test_a_value_of_more_or_fewer_fields_than_there_are_is_refused(values):
    with pytest.raises(ValueError, match="values to unpack"):
        made_of(values)


def test_what_is_made_at_once_is_what_the_usual_way_makes():
    assert Quick(1) == Quick(x=1, y=(), labels={})
    assert Quick(1, (2, 3), {"a": 4}) == replace(Quick(1, labels={"a": 4}), y=(2, 3))
    assert hash(Point(1)) == hash(Point(1))
    assert repr(Quick(1)) == "Quick(x=1, y=(), labels={})"
    assert Quick(1).labels is not Quick(1).labels


def test_what_is_made_at_once_is_frozen_and_copied_as_any_other():
    made = Quick(1, (2,))
    assert type(made) is Quick
    with pytest.raises(FrozenInstanceError):
        made.x = 3  # type: ignore[misc]
    assert made == copy.copy(made) == copy.deepcopy(made) == pickle.loads(pickle.dumps(made))


@pytest.mark.parametrize("given", [{}, {"x": 1, "z": 2}])
def test_what_is_made_at_once_takes_its_fields_and_no_others(given):
    with pytest.raises(TypeError, match="argument"):
        Quick(**given)


def test_a_class_that_fills_a_field_itself_is_not_made_at_once():
    @dataclass(frozen=True, slots=True)
    class Doubled:
        x: int
        double: int = field(init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "double", 2 * self.x)

    with pytest.raises(TypeError, match="leave @made_at_once out"):
        made_at_once(Doubled)
