"""Programs that prepare environments, each in a process of its own under limits."""

import asyncio
import contextlib
import os
import pwd
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_LIMITED = str(Path(__file__).with_name("limited.py"))
KEPT_BYTES = 256 * 1024
"""The most bytes that are kept of what a program prints."""


class ProcessUser(NamedTuple):
    uid: int = -1
    gid: int = -1

    @classmethod
    def named(cls, name: str) -> "ProcessUser":
        """Return a user by name; the present one if the name is empty, or if this process may not change its
        user. Raises KeyError."""
        if not name or os.geteuid() != 0:
            return cls()
        entry = pwd.getpwnam(name)
        return cls(entry.pw_uid, entry.pw_gid)


class ProcessLimits(NamedTuple):
    memory_mb: int
    seconds: float


class ProgramEnd(NamedTuple):
    code: int
    output: str
    """What the program printed, standard output and errors together."""


async def run_limited(
    program: Sequence[str],
    env: Mapping[str, str],
    directory: str,
    user: ProcessUser,
    limits: ProcessLimits,
    on_line: Callable[[str], None] = lambda _line: None,
) -> ProgramEnd:
    """Run a program to its end, and return how it ended. `on_line` gets each line that it prints. After
    `limits.seconds` the program is killed, which is code -9. Raises OSError if it cannot be started."""
    about = (str(user.uid), str(user.gid), str(limits.memory_mb), str(int(limits.seconds) + 1))
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", _LIMITED, *about, *program,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        cwd=directory, env=env, start_new_session=True,
    )  # fmt: skip
    kept: list[str] = []
    try:
        async with asyncio.timeout(limits.seconds):
            await _read(child, kept, on_line)
            return ProgramEnd(await child.wait(), "".join(kept))
    except TimeoutError:
        line = f"error: it did not end within {limits.seconds:g} s and was killed\n"
        on_line(line)
        return ProgramEnd(-signal.SIGKILL, "".join((*kept, line)))
    finally:
        # Also what the program has started and left behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()


async def _read(child: asyncio.subprocess.Process, kept: list[str], on_line: Callable[[str], None]) -> None:
    assert child.stdout is not None
    room = KEPT_BYTES
    while data := await _line(child.stdout):
        line = data.decode(errors="replace")
        room -= len(line)
        if room > 0:
            kept.append(line)
        on_line(line)


async def _line(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readline()
    except ValueError:  # a line longer than the stream's limit
        return await stream.read(64 * 1024)
