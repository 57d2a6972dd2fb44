"""One Ray head for all tests that only need an executor; those that harm it open their own."""

import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.ray_lab import Lab, lab_options


@contextmanager
def a_home() -> Iterator[Path]:
    """A short path, and nothing left of it also when what happens there fails or is cancelled."""
    home = Path(tempfile.mkdtemp(prefix="gpb-lab-"))
    try:
        yield home
    finally:
        shutil.rmtree(home)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def lab() -> AsyncIterator[Lab]:
    with a_home() as home:
        lab = Lab(lab_options(home))
        try:
            await lab.open()
            yield lab
        finally:
            await lab.close()


@pytest_asyncio.fixture(loop_scope="session")
async def open_lab() -> AsyncIterator[Callable[..., Awaitable[Lab]]]:
    """Opens labs with few processes ready, on a data directory of the test's; closed after it."""
    labs: list[Lab] = []
    with a_home() as home:

        async def open_one(term: int = 1, **changes: Any) -> Lab:
            labs.append(Lab(lab_options(**{"data_dir": home, "spares": 1, "warm_runners": 0, **changes})))
            await labs[-1].open(term)
            return labs[-1]

        try:
            yield open_one
        finally:
            for lab in labs:
                await lab.close()


@pytest.fixture
def as_guest(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of the shared head, and the environment that somebody who joins it needs."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(lab.options.data_dir / "ray-token"))
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # A joined cluster's runs have their directory below the temporary one.
    monkeypatch.setattr(tempfile, "tempdir", str(lab.options.data_dir))
    return lab.head.address
