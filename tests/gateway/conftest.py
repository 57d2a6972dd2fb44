from collections.abc import AsyncIterator

import pytest

from tests.gateway.harness import Client, Gateway


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with Gateway() as gateway:
        yield gateway


@pytest.fixture
def api(gateway: Gateway) -> Client:
    """The admin's client."""
    return gateway.admin
