"""Which Ray head a broker gets, without starting one."""

import asyncio
import os
from pathlib import Path

import pytest
from gpubroker_server.adapters.ray.head import head
from gpubroker_server.adapters.ray.head.head import HeadState, running_head, versions, write_state
from gpubroker_server.adapters.ray.options import RayOptions
from gpubroker_server.adapters.ray.processes import boot_id, process_id


async def test_brokers_that_need_a_head_at_the_same_time_start_one_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[HeadState] = []

    async def start(options: RayOptions, _chooses_ports: bool) -> HeadState:
        """This very process stands in for it."""
        await asyncio.sleep(0.01)
        state = HeadState(
            os.getpid(), process_id(os.getpid()).start_ticks, boot_id(), "127.0.0.1:1", "", *versions()
        )
        started.append(state)
        write_state(options.data_dir, state)
        return state

    monkeypatch.setattr(head, "_start", start)
    found = await asyncio.gather(*(running_head(RayOptions(tmp_path)) for _ in range(3)))
    assert found == started * 3
