"""A function that its module lacks is refused at submit, however it is submitted."""

from collections.abc import Callable
from typing import Any

import pytest
from gpubroker import Broker, Refused, Submission

WRONG = "tests.e2e.work:ad"


@pytest.mark.parametrize(
    "submit",
    [
        lambda broker: broker.submit(WRONG, 1, 2),
        lambda broker: broker.submit_array(WRONG, [1]),
        lambda broker: broker.create_worker_set("tests.e2e.work:Counte"),
    ],
)
def test_a_function_that_its_module_lacks_is_refused(broker: Broker, submit: Callable[[Broker], Any]) -> None:
    with pytest.raises(Refused, match=r'module "tests\.e2e\.work" defines no .*; did you mean "'):
        submit(broker)


def test_in_a_batch_and_in_a_dry_run_it_is_refused_too(broker: Broker) -> None:
    right, wrong = broker.submit_many([Submission("tests.e2e.work:add", 1, 2), Submission(WRONG, 1, 2)])
    assert (broker.result(str(right)), type(wrong)) == (3, Refused)
    assert broker.simulate(WRONG, 1, 2).verdict == "refused"
