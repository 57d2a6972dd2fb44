"""Clients without a token that take what they can get: `python -m tests.bootstrap.strangers PORT IDLE`.

IDLE connections say nothing or send a head bit by bit, and are opened again ten seconds after the service
has closed them; two more send heads without end, one after the other, as fast as they can. Prints a line when
all have been connected, and runs until it is ended.
"""

import asyncio
import contextlib
import resource
import sys

HEAD = b"GET /tasks HTTP/1.1\r\nHost: localhost\r\n"
ENDLESS = (b"x" * 65_536, b"a: b\r\n" * 10_000)


async def stay(port: int, is_slow: bool, first: asyncio.Barrier) -> None:
    is_first = True
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if is_first:
                is_first = False
                await first.wait()
            writer.write(HEAD if is_slow else b"")
            while not reader.at_eof():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        await reader.read()
                writer.write(b"x: y\r\n" if is_slow else b"")
            writer.close()
        await asyncio.sleep(10)


async def send_heads(port: int, piece: bytes) -> None:
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD)
            while not reader.at_eof():
                writer.write(piece)
                await writer.drain()
            writer.close()


async def main(port: int, idle: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * idle)), hard))
    first = asyncio.Barrier(idle + 1)
    async with asyncio.TaskGroup() as group:
        for number in range(idle):
            group.create_task(stay(port, number % 2 == 0, first))
        for piece in ENDLESS:
            group.create_task(send_heads(port, piece))
        await first.wait()
        print("all are connected", flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
