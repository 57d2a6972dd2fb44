"""A part that ends takes the whole service with it: visibly, and without leaving anything behind."""

import asyncio
import gc
import json
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from gpubroker import BrokerError
from gpubroker_server.adapters.sql.store import open_store
from gpubroker_server.bootstrap.follower import LogFollower
from gpubroker_server.bootstrap.object_store import open_blobs
from gpubroker_server.bootstrap.process import Process
from gpubroker_server.settings.loading import load_settings
from structlog.testing import capture_logs

from tests.bootstrap.pressed import FULL_AT_THREE, pressures, refusal, wait_in
from tests.bootstrap.refusals import WAITING
from tests.chaos.forked import ForkedService
from tests.e2e.service_process import until
from tests.patience import PATIENCE_SECONDS


async def test_a_service_that_cannot_listen_ends_and_leaves_nothing_running(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path, engine="simulated")
    store = await open_store(settings.database)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as no_listener, capture_logs() as logs:
        no_listener.bind(("127.0.0.1", 0))
        blobs = await open_blobs(settings, store)
        process = Process(settings, store, blobs, listener=no_listener, leads=True)
        assert await asyncio.wait_for(process.run(), PATIENCE_SECONDS) == 1
    [line] = [line for line in logs if line["log_level"] == "error"]
    assert line["subject"] == "http"
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await store.close()


async def test_each_part_that_fails_is_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail() -> None:
        raise ValueError("of the test")

    monkeypatch.setattr(LogFollower, "jobs", lambda _: [("first", fail()), ("second", fail())])
    unheard: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: unheard.append(about))
    settings = load_settings(data_dir=tmp_path, engine="simulated")
    store = await open_store(settings.database)
    blobs = await open_blobs(settings, store)
    with capture_logs() as logs:
        process = Process(settings, store, blobs, listener=None, leads=True)
        assert await asyncio.wait_for(process.run(), PATIENCE_SECONDS) == 1
    await store.close()
    gc.collect()
    assert [line["subject"] for line in logs if "of the test" in line.get("fault", "")] == ["first", "second"]
    assert unheard == []


def test_queue_that_is_too_long_keeps_background_work_out_until_shorter(tmp_path: Path) -> None:
    """It covers the way from the leader's look to the answer of the gateway, and a crash in the middle."""
    with ForkedService(tmp_path / "data", **WAITING, **FULL_AT_THREE) as service:
        waiting = [wait_in(service) for _ in range(3)]
        until(lambda: refusal(service, 5) is not None, "three tasks wait")
        refused = refusal(service, 5)
        assert refused is not None
        assert (refused.status, refused.code, refused.retry_after_seconds) == (429, "backpressure", 1.0)
        assert refusal(service, 50) is None
        until(lambda: pressures(service) == ["ACTIVATED"], "it is in the log")
        service.broker.cancel(waiting.pop())
        until(lambda: is_kept(tmp_path / "data" / "gpubroker.db"), "the next start knows of it")
        service.kill_9()
        service.start()
        assert refusal(service, 5) is not None  # between the thresholds it goes on
        for task in waiting:
            service.broker.cancel(task)
        until(lambda: refusal(service, 5) is None, "no task waits any more")
        until(lambda: pressures(service) == ["ACTIVATED", "RELEASED"], "it is over in the log as well")


def is_kept(database: Path) -> bool:
    with closing(sqlite3.connect(database)) as known:
        found = known.execute("SELECT value FROM last_value WHERE kind = 'leader'").fetchall()
    return any(json.loads(value)["fleet"]["pressures"] for (value,) in found)


def test_log_with_a_hole_ends_the_service_and_the_next_start_rereads_rows(
    tmp_path: Path,
) -> None:
    with ForkedService(tmp_path / "data", **WAITING) as service:
        until(lambda: bool(service.broker.gpus()), "the log has begun: a hole at its beginning is no hole")
        with sqlite3.connect(tmp_path / "data" / "gpubroker.db") as database:
            database.execute("UPDATE log_head SET position = position + 1")
        database.close()
        with pytest.raises(BrokerError):
            service.broker.submit("tests.e2e.work:add", cpu=0.5)
        assert service.ended() == 1
        assert "is missing; read the World again" in service.log()
        service.start()
        task = service.broker.submit("tests.e2e.work:add", cpu=0.5)
        assert service.broker.wait(task.id, timeout_seconds=PATIENCE_SECONDS).state == "succeeded"
