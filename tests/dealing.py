"""How tests are dealt to the processes of `make test`; a run in one process knows nothing of this.

A file stays in one process. So does all that starts a Ray: heads, services and nodes are shared there, and
two clusters at a time on a small machine would be slow in a way that no user meets. And so do the tests with
a Triton, of which there is one.
"""

import pytest
from xdist.scheduler import LoadScopeScheduling

ON_RAY = (
    "tests/e2e/",
    "tests/client/test_readme.py",
    "tests/deploy/test_wheels.py",
    "tests/chaos/test_runs.py::test_kills_of_processes_on_ray",
)
ON_TRITON = "tests/triton/"
_IN_TURN = (
    *ON_RAY,
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
        if nodeid.startswith(ON_RAY):
            return "on Ray"
        return "on Triton" if nodeid.startswith(ON_TRITON) else nodeid.partition("::")[0]


def put_in_turn(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _turn(item.nodeid))


def _turn(nodeid: str) -> int:
    begins = (turn for turn, beginning in enumerate(_IN_TURN) if nodeid.startswith(beginning))
    return next(begins, len(_IN_TURN))
