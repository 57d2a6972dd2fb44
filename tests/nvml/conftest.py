"""A node agent on the real `pynvml`, whose library is the stand-in, and on runners that only wait."""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from gpubroker_server.adapters.nvml import probe

from tests.contracts.fake_runners import FakeRunners, Leader, a_leader


@pytest.fixture
def runners() -> Iterator[FakeRunners]:
    with closing(FakeRunners()) as runners:
        yield runners


@pytest.fixture
def open_leader(
    runners: FakeRunners, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Leader]:
    """Of an agent that samples often. The stand-in tells process ids as they are here, whatever container
    the tests run in."""
    monkeypatch.setattr(probe, "shares_pids", lambda: True)
    return partial(a_leader, runners, tmp_path, devices=None, sample_period_seconds=0.05)
