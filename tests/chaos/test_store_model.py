"""The store behaves like its model, in any order of calls and wherever a connection is cut."""

import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from gpubroker_server.adapters.sql.store import migrate
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.chaos.store_model import StoreMachine
from tests.chaos.sweep import without_startup_checks
from tests.postgres import reset

Fresh = Callable[[], str]


@pytest.fixture(params=["sqlite", "postgres"])
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fresh]:
    """Creates an empty database with each call."""
    if request.param == "postgres":
        url = str(request.getfixturevalue("postgres_url"))

        def emptied() -> str:
            reset(url)
            return url

        make = emptied
    else:
        first, numbers = tmp_path / "first.db", count()
        migrate(f"sqlite:///{first}", "head")

        def copied() -> str:
            copy = tmp_path / f"{next(numbers)}.db"
            shutil.copy(first, copy)
            return f"sqlite:///{copy}"

        make = copied
    with without_startup_checks():
        yield make


def machine_on(fresh: Fresh) -> type[StoreMachine]:
    return type("StoreMachine", (StoreMachine,), {"fresh": staticmethod(fresh)})


@pytest.mark.hypothesis
def test_the_store_behaves_like_its_model(fresh: Fresh) -> None:
    run_state_machine_as_test(machine_on(fresh), settings=settings(max_examples=10, stateful_step_count=20))


@pytest.mark.evidence
@pytest.mark.timeout(3600)
def test_the_store_behaves_like_its_model_in_many_long_runs(fresh: Fresh) -> None:
    many = settings(max_examples=1000, stateful_step_count=50, derandomize=False)
    run_state_machine_as_test(machine_on(fresh), settings=many)
