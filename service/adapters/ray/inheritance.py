"""What an earlier agent of this node left behind. Looking changes nothing, so that it can be done again."""

import asyncio
from typing import Any, NamedTuple

from ray.exceptions import RayError

from service.adapters.ray.cards import Card, RunFiles
from service.adapters.ray.pool import describe
from service.adapters.ray.runners import Runners

ANSWER_SECONDS = 10.0
"""For a runner to say who it is; one that does not is of no use any more."""


class Inheritance(NamedTuple):
    carded: list[tuple[Card, Any | None]]
    """Runs, each with its runner's handle if Ray still has it."""
    others: list[tuple[str, Any, dict[str, Any] | None]]
    """Name and handle of each other runner, and what it says of itself."""


async def look_around(files: RunFiles, runners: Runners) -> Inheritance:
    """Raises UnreadableCard, OSError and RayError: what cannot be found out is not known to be absent."""
    cards = files.cards()
    names = await asyncio.to_thread(runners.names)
    found = {name: await asyncio.to_thread(runners.find, name) for name in names}
    carded = [(card, found.pop(card.runner, None)) for card in cards]
    others = [(name, runner, await _said_of(runner)) for name, runner in found.items() if runner is not None]
    return Inheritance(carded, others)


async def _said_of(runner: Any) -> dict[str, Any] | None:
    """None if it does not answer, or is of another release."""
    try:
        return await describe(runner, ANSWER_SECONDS)
    except (RayError, TimeoutError, ValueError):
        return None
