"""`python -m bench soak` for two seconds."""

from argparse import Namespace

from bench.load import OpenLoop
from bench.pickup import roomy_deployment
from bench.soak import soak


def test_waits_with_a_reader_are_compared_with_waits_before_it() -> None:
    with roomy_deployment("sqlite") as running, OpenLoop() as load:
        figure = soak(running, "sqlite", load, Namespace(seconds=2.0, per_second=30.0))
    assert figure.n > 5
    assert figure.baseline is not None
    assert figure.ratio == figure.value / figure.baseline
