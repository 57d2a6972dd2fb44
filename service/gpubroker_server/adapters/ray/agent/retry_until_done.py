"""What has to come to its end is tried again until it does, and says each time why it did not."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

log = structlog.get_logger("gpubroker.agent")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 30.0


async def until_done(what: str, attempt: Callable[[], Awaitable[None]]) -> None:
    """`attempt` starts from the beginning each time; less and less often."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return await attempt()
        except Exception:
            log.exception("what must be done failed; trying again", job=what)
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
