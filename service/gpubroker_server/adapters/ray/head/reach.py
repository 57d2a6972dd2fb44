"""Whether anybody answers where Ray should be, and what to do if Ray cannot be had."""

import asyncio
import errno
import os

from gpubroker_server.adapters.ray.head.head import HeadRefused
from gpubroker_server.adapters.ray.options import RayOptions

REACH_SECONDS = 5.0


async def reach(address: str) -> None:
    """Raises HeadRefused if nothing answers there: Ray itself would say so only after minutes."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(REACH_SECONDS):
            _reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError) as fault:
        why = getattr(fault, "strerror", None) or f"no answer within {REACH_SECONDS:g} s"
        raise HeadRefused(
            f"nothing answers at {address}, the configured ray.address: {why}; start the head of the cluster "
            "there, correct ray.address, or leave it out to have a local Ray started"
        ) from None
    writer.close()


def advice(fault: Exception, options: RayOptions) -> str:
    if not isinstance(fault, OSError) or fault.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        return str(fault)
    return (
        f"cannot start Ray: {fault.strerror}: {fault.filename}; give {options.data_dir} and all in it to "
        f"the service's user (uid {os.geteuid()}), or choose another directory with --data-dir"
    )
