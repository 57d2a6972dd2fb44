"""Memory in pieces is told to the log once, when it was seen twice."""

from pathlib import Path

from gpubroker_server.core.domain.decisions import Request
from structlog.testing import capture_logs

from tests.broker.stage import a_stage
from tests.builders import GIB


async def test_fragmentation_is_logged_when_it_begins_and_when_it_ends(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        for name in ("a", "b"):
            await stage.submit(name, seconds=3600.0, gpu_mb=14 * GIB)
        await stage.turn()
        large = await stage.submit("large", gpu_mb=20 * GIB)
        with capture_logs() as lines:
            for _ in range(4):
                await stage.later(16.0)
            cancel = Request("r1", large.id, "default", "cancel", {}, stage.clock.now())
            await stage.store.request(cancel)
            for _ in range(4):
                await stage.later(16.0)
    told = [line for line in lines if "pieces" in line["event"]]
    assert [line["log_level"] for line in told] == ["warning", "info"]
    assert (told[0]["waiting"], told[0]["need_mb"], told[0]["free_mb"]) == (1, 20 * GIB, 20 * GIB)
    assert told[0]["largest_mb"] == 10 * GIB
