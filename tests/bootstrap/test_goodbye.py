"""A gateway that ends says so, and nothing after that: others would wait for it, or leave it its slots."""

import asyncio
from pathlib import Path

import pytest
from gpubroker_server.bootstrap.object_store import open_blobs
from gpubroker_server.bootstrap.process import Process
from gpubroker_server.bootstrap.start_checks import listening_socket
from gpubroker_server.core.serving.slots import Claim
from gpubroker_server.ports.last_values import Presence
from gpubroker_server.settings.loading import load_settings

from tests.contracts.scenes import opened
from tests.patience import PATIENCE_SECONDS

NOWHERE = "http://127.0.0.1:9"
SERVER = {"name": "main", "http_url": NOWHERE, "grpc_url": NOWHERE, "node": "local"}


async def test_a_gateway_reports_its_absence_last(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = {"servers": [SERVER], "slots": {"m": 4}}
    settings = load_settings(
        data_dir=tmp_path, database_url=postgres_url, port=0, triton=triton, drain_seconds=2.0
    )
    async with opened(postgres_url) as store:
        said: list[str] = []
        present, absent, claim, drop = store.present, store.absent, store.claim_slots, store.drop_slots

        async def note_present(presence: Presence) -> None:
            said.append("here")
            await present(presence)

        async def note_claim(claimed: Claim) -> None:
            said.append("uses slots")
            await claim(claimed)

        async def note_absent(gateway: str) -> None:
            """And leave those time who would still say something."""
            await absent(gateway)
            said.append("gone")
            async with asyncio.timeout(PATIENCE_SECONDS):
                while said[-1] != "here" and "presence" in _jobs():  # noqa: ASYNC110  # as below
                    await asyncio.sleep(0.01)

        async def note_drop(gateway: str) -> None:
            await drop(gateway)
            said.append("uses none")

        for name, noted in (("present", note_present), ("absent", note_absent)):
            monkeypatch.setattr(store, name, noted)
        for name, noted_too in (("claim_slots", note_claim), ("drop_slots", note_drop)):
            monkeypatch.setattr(store, name, noted_too)
        blobs = await open_blobs(settings, store)
        with listening_socket(settings.host, settings.port) as listener:
            process = Process(settings, store, blobs, listener=listener, leads=False)
            running = asyncio.create_task(process.run())
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not {"here", "uses slots"} <= set(said):  # noqa: ASYNC110  # nothing tells of it
                    await asyncio.sleep(0.01)
            process._shut_down(False)
            assert await asyncio.wait_for(running, PATIENCE_SECONDS) == 0
        assert said[-2:] == ["gone", "uses none"]
        assert await store.presences() == []
        assert await store.slot_claims() == []


def _jobs() -> set[str]:
    return {job.get_name() for job in asyncio.all_tasks()}
