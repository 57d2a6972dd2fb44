"""One Ray head for all tests that only need an executor; those that harm it open their own."""

import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest_asyncio

from tests.e2e.ray_lab import Lab, lab_options


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def lab() -> AsyncIterator[Lab]:
    home = Path(tempfile.mkdtemp(prefix="gpb-lab-"))
    lab = Lab(lab_options(home))
    await lab.open()
    yield lab
    await lab.close()
    shutil.rmtree(home)


@pytest_asyncio.fixture(loop_scope="session")
async def open_lab() -> AsyncIterator[Callable[..., Awaitable[Lab]]]:
    """Opens labs with few processes ready, on a data directory of the test's; closed after it."""
    home = Path(tempfile.mkdtemp(prefix="gpb-lab-"))
    labs: list[Lab] = []

    async def open_one(term: int = 1, **changes: Any) -> Lab:
        labs.append(Lab(lab_options(**{"data_dir": home, "spares": 1, "warm_runners": 0, **changes})))
        await labs[-1].open(term)
        return labs[-1]

    yield open_one
    for lab in labs:
        await lab.close()
    shutil.rmtree(home)
