"""`gpubroker streams` against the real gateway."""

import asyncio
import io
import json
import re

from tests.client.screens import command_line, run
from tests.gateway.harness import Gateway


async def said(line: str) -> str:
    out = io.StringIO()
    await asyncio.to_thread(run, line, out)
    return out.getvalue()


async def test_work_streams_are_put_signalled_listed_drawn_and_deleted() -> None:
    async with Gateway() as gateway:
        token = gateway.admin.headers["authorization"].removeprefix("Bearer ")
        with command_line(gateway, token, None):
            assert re.search(r"^nightly +0.5 +1 +1 +1 +0.5 +100.0%$", await said("streams"), re.MULTILINE)
            assert re.search(r"^ladder +3 +1 +1 +1 +3 ", await said("streams put ladder 3"), re.MULTILINE)
            told = await said("streams signal ladder --progress 1200 --data-age 1h --quality 0.5")
            assert re.search(r"^ladder +3 +1 +2 +0.55 +3.3 +83.2%$", told, re.MULTILINE)
            assert gateway.world.streams["ladder"].progress == 1200.0
            assert "give at least one of" in await said("streams signal ladder")
            assert await said("streams next --seed 7") == "ladder\n"
            await said("pause --stream nightly")
            assert re.search(r"^nightly +0.5 .* paused$", await said("streams"), re.MULTILINE)
            shown = json.loads(await said("streams -o json"))
            assert [(it["name"], it["paused"]) for it in shown] == [("ladder", False), ("nightly", True)]
            assert "is forgotten" in await said("streams delete ladder")
            assert "all are paused" in await said("streams next")
