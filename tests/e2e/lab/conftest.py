"""One Ray head with an executor for all tests in this folder, and another one for who harms it."""

import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.ray_lab import Lab, guest_environment, lab_options


@contextmanager
def a_home() -> Iterator[Path]:
    """A short path, and nothing left of it also when what happens there fails or is cancelled."""
    home = Path(tempfile.mkdtemp(prefix="gpb-lab-"))
    try:
        yield home
    finally:
        shutil.rmtree(home)


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def shared_lab() -> AsyncIterator[Lab]:
    """It stands still while a test runs that does not share its event loop."""
    with a_home() as home:
        lab = Lab(lab_options(home))
        try:
            await lab.open()
            yield lab
        finally:
            await lab.close()


@pytest_asyncio.fixture(loop_scope="session")
async def lab(shared_lab: Lab) -> AsyncIterator[Lab]:
    """One to which its agent listens: agents give up whoever asks them nothing for half a minute."""
    await shared_lab.wake()
    yield shared_lab
    shared_lab.slept_since = time.monotonic()


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
def as_guest(shared_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of the shared head, with the environment to join it."""
    for name, value in guest_environment(shared_lab.options.data_dir).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", None)
    return shared_lab.head.address
