"""Messages between the service and its Ray driver process: msgpack behind a length, over a socket pair."""

import asyncio
from typing import Any

from gpubroker_server.adapters.ray.wire import pack, unpack

_LENGTH_BYTES = 4


def frame(*parts: Any) -> bytes:
    data = pack(parts)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


async def read_frame(reader: asyncio.StreamReader) -> tuple[Any, ...] | None:
    """None when the other side is gone."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        parts: tuple[Any, ...] = unpack(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return parts
