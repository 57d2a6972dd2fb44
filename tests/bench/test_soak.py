"""The short form of `python -m bench soak`: two seconds, of which one and a half beside a reader."""

from argparse import Namespace

from bench.pace import Pace
from bench.pickup import roomy
from bench.soak import soak


def test_tasks_are_picked_up_beside_a_reader_and_compared_with_those_before_it() -> None:
    with roomy("sqlite") as running, Pace() as pace:
        figure = soak(running, "sqlite", pace, Namespace(seconds=2.0, per_second=30.0))
    assert figure.n > 5
    assert figure.baseline is not None
    assert figure.ratio == figure.value / figure.baseline
