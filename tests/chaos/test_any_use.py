"""The store does what a few dicts say, in any order of calls and wherever its line is cut."""

import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from gpubroker_server.adapters.sql.store import migrate
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.chaos.any_use import AnyUse
from tests.chaos.sweep import migrated_before
from tests.postgres import reset

Fresh = Callable[[], str]


@pytest.fixture(params=["sqlite", "postgres"])
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fresh]:
    """Makes a database in which nothing is, as often as it is called."""
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
    with migrated_before():
        yield make


def used(fresh: Fresh) -> type[AnyUse]:
    return type("AnyUse", (AnyUse,), {"fresh": staticmethod(fresh)})


@pytest.mark.hypothesis
def test_any_use_of_the_store_is_what_the_model_says(fresh: Fresh) -> None:
    run_state_machine_as_test(used(fresh), settings=settings(max_examples=10, stateful_step_count=20))


@pytest.mark.evidence
@pytest.mark.timeout(3600)
def test_much_use_of_the_store_is_what_the_model_says(fresh: Fresh) -> None:
    every = settings(max_examples=1000, stateful_step_count=50, derandomize=False)
    run_state_machine_as_test(used(fresh), settings=every)
