import copy
import pickle
from collections.abc import Mapping
from dataclasses import field, replace

import pytest
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.core.domain.values import changed, value


@value
class Point:
    x: int
    y: tuple[int, ...] = ()
    labels: Mapping[str, int] = field(default_factory=dict)


def test_a_changed_copy_differs_in_the_named_fields_only():
    first = Point(1, (2, 3))
    assert changed(first, x=7) == replace(first, x=7) == Point(7, (2, 3))
    assert changed(first) == first == Point(1, (2, 3))


def test_a_name_that_is_not_a_field_is_refused():
    with pytest.raises(AttributeError):
        changed(Point(1), z=2)


def test_a_value_compares_and_prints_as_a_dataclass_and_has_its_own_defaults():
    assert Point(1) == Point(x=1, y=(), labels={}) != Point(2)
    assert repr(Point(1)) == "Point(x=1, y=(), labels={})"
    assert Point(1).labels is not Point(1).labels


def test_a_value_can_be_copied_and_pickled():
    made = Point(1, (2,))
    assert made == copy.copy(made) == copy.deepcopy(made) == pickle.loads(pickle.dumps(made))


def test_equal_demands_have_equal_hashes():
    one, other = Demand(gpus=1, gpu_mb=Mib(1024)), Demand(gpus=1, gpu_mb=Mib(1024))
    assert hash(one) == hash(other) == hash(changed(other, gpus=1))
    assert hash(changed(one, gpus=2)) == hash(Demand(gpus=2, gpu_mb=Mib(1024))) != hash(one)
