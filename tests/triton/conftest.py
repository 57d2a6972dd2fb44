"""One real Triton for all tests of this folder. Who harms one starts another."""

from collections.abc import Iterator

import pytest

from tests.triton.server import Triton

LOADED = ("any_type", "echo_bytes", "identity_fp32", "queued", "slow", "stream_n")
"""From the start; the others of the folder `models` are for tests of loading."""


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    with Triton(tmp_path_factory.mktemp("triton"), loaded=LOADED) as running:
        yield running
