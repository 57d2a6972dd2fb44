"""Processes that a run has left are found whatever they are doing."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpubroker.runtime.process import INSTANCE_MARK, RUN_MARK
from gpubroker_server.adapters.ray.processes import is_alive, kill_leftovers, process_id

from tests.patience import PATIENCE_SECONDS

ROUNDS = 20


@pytest.fixture
def restless(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the run t:1 that calls exec all the time, and shows no environment meanwhile."""
    script = tmp_path / "again"
    script.write_text('#!/bin/sh\nexec "$0"\n')
    script.chmod(0o755)
    env = {**os.environ, RUN_MARK: "t:1", INSTANCE_MARK: "here", "FILLER": "x" * 100_000}
    with subprocess.Popen([script], env=env) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("number", range(ROUNDS))
async def test_process_that_calls_exec_is_found(
    restless: subprocess.Popen[bytes], tmp_path: Path, number: int
) -> None:
    process = process_id(restless.pid)
    await kill_leftovers("here", "t:1", tmp_path / f"{number}.log")
    assert not is_alive(process)


def test_process_without_environment_holds_up_no_proof(tmp_path: Path) -> None:
    with subprocess.Popen(["env", "-i", "sleep", "600"]) as process:
        while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
            pass
        bare = process_id(process.pid)
        proof = kill_leftovers("here", "t:1", tmp_path / "log", bare.start_ticks)
        asyncio.run(asyncio.wait_for(proof, PATIENCE_SECONDS))
        assert is_alive(bare)
        process.kill()
