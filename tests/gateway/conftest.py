from collections.abc import AsyncIterator

import pytest

from tests.gateway.harness import Client, Gateway
from tests.gateway.worker_stage import Workers


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with Gateway() as gateway:
        yield gateway


@pytest.fixture
def api(gateway: Gateway) -> Client:
    """The admin's client."""
    return gateway.admin


@pytest.fixture
async def workers(gateway: Gateway) -> AsyncIterator[Workers]:
    found = Workers()
    gateway.change(worker_calls=found)
    yield found
    found.end()
