"""How tests are dealt to the processes of `make test`; a run in one process knows nothing of this.

A file stays in one process. So do the tests that share Ray heads, services and nodes, the tests that each
start a Ray of their own, and the tests with a Triton, of which there is one. Each of these three takes about
as long as all other tests together, mostly waiting: decision 181 has the reasons.
"""

import pytest
from xdist.scheduler import LoadScopeScheduling

ON_A_SHARED_RAY = ("tests/e2e/lab/", "tests/e2e/service/")
ON_RAYS_OF_THEIR_OWN = (
    "tests/e2e/",
    "tests/client/test_readme.py",
    "tests/deploy/test_wheels.py",
    "tests/chaos/test_runs.py::test_kills_of_processes_on_ray",
)
ON_TRITON = "tests/triton/"
_IN_TURN = (
    *ON_A_SHARED_RAY,
    *ON_RAYS_OF_THEIR_OWN,
    "tests/chaos/",
    ON_TRITON,
    "tests/bootstrap/",
    "tests/simulation/",
    "tests/bench/",
    "tests/contracts/",
)
"""What takes longest begins first, or in the end one process would wait for the other."""


class Dealer(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Deals in the order in which tests were found, which is that of `put_in_turn`."""

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        """What it is dealt with."""
        if nodeid.startswith(ON_A_SHARED_RAY):
            return "on a shared Ray"
        if nodeid.startswith(ON_RAYS_OF_THEIR_OWN):
            return "on Rays of their own"
        return "on Triton" if nodeid.startswith(ON_TRITON) else nodeid.partition("::")[0]


def put_in_turn(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _turn(item.nodeid))


def _turn(nodeid: str) -> int:
    begins = (turn for turn, beginning in enumerate(_IN_TURN) if nodeid.startswith(beginning))
    return next(begins, len(_IN_TURN))
