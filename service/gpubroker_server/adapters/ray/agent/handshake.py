"""What a runner says of itself before anything else: who it is, and in which form to speak with it."""

import asyncio
from typing import Any

from gpubroker.runtime.messages import SPOKEN, agreed

from gpubroker_server.adapters.ray.wire import unpack


async def describe(actor: Any, timeout_seconds: float | None) -> dict[str, Any]:
    """With `protocol`, the newest form that both speak. Raises RayError, TimeoutError, or ValueError if there
    is none."""
    async with asyncio.timeout(timeout_seconds):
        told: dict[str, Any] = unpack(await actor.describe.remote())
    spoken = told.get("speaks", (told["protocol"],))
    protocol = agreed(spoken)
    if protocol is None:
        raise ValueError(f"it speaks protocols {spoken}, this agent {SPOKEN}")
    return told | {"protocol": protocol}
