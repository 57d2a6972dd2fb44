"""The stacks of a run's Python threads, read from outside by py-spy while the threads go on.

A thread that never gives up the interpreter's lock is read too, and so is a command that is Python.
"""

import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gpubroker.runtime.messages import Report, RunKey

from gpubroker_server.adapters.ray.agent.runner_process import AgentRun
from gpubroker_server.adapters.ray.processes import descendants, name_of, process_table

READ_SECONDS = 8.0
TRIES = 3
"""A thread that goes on while it is read may make a read fail."""
MOST_PROCESSES = 16
MOST_CHARACTERS = 100_000
NOT_PYTHON = "Failed to find python version"
INSTALL = "py-spy is not installed beside the Python of its node; pip install 'gpubroker-server[ray]' there"
NOT_ALLOWED = (
    "its node's agent may not read the memory of its process: the agent needs CAP_SYS_PTRACE, or the same "
    "user as the run and kernel.yama.ptrace_scope=0"
)


class Unreadable(Exception):
    """The text says why."""


async def tell_stack(
    run: AgentRun | None, key: RunKey, request: str, report: Callable[[Report], None]
) -> None:
    stack, message = await stack_of(run)
    report(("stack", *key, time.time(), request, stack, message))


async def stack_of(run: AgentRun | None) -> tuple[str, str]:
    """(the stacks as text, ""), or ("", why there are none)."""
    if run is None or run.process is None or run.has_ended:
        return "", "it has no process now"
    root = run.process.watched.id.pid
    try:
        async with asyncio.timeout(READ_SECONDS):
            if run.order.kind == "command":
                return await _stacks_below(root)
            threads = await _threads_of(root)
    except (Unreadable, TimeoutError) as fault:
        return "", str(fault) or f"its process could not be read within {READ_SECONDS:g} s"
    if run.shared:  # beside runs of other tasks
        threads = [thread for thread in threads if thread["thread_name"] == str(run.key)]
    return (_text(threads), "") if threads else ("", "its thread is not there: it begins or ends just now")


async def _stacks_below(root: int) -> tuple[str, str]:
    """Return the stacks of each process of a command that is Python, and what is said of the others."""
    table = await asyncio.to_thread(process_table)
    pids = [process.pid for process in descendants(root, table)][:MOST_PROCESSES]
    texts, others = [], []
    for pid in pids:
        try:
            texts.append(f"Process {pid} ({name_of(pid)})\n{_text(await _threads_of(pid))}")
        except Unreadable as fault:
            if NOT_PYTHON not in str(fault):
                raise
            others.append(name_of(pid) or "ended")
    if texts:
        return "\n".join(texts)[:MOST_CHARACTERS], ""
    return "", f"it is a command, and none of its processes is Python: {', '.join(others) or 'it has none'}"


async def _threads_of(pid: int) -> list[dict[str, Any]]:
    """Return the threads that py-spy reads. Raises Unreadable."""
    errors = ""
    for _ in range(TRIES):
        code, out, errors = await _py_spy("dump", "--json", "--nonblocking", "--pid", str(pid))
        if code == 0:
            found: list[dict[str, Any]] = json.loads(out)
            return found
        if NOT_PYTHON in errors:
            raise Unreadable(NOT_PYTHON)
        if "ermission" in errors or "not permitted" in errors:
            raise Unreadable(NOT_ALLOWED)
    raise Unreadable(
        f"its process could not be read: {errors.strip().splitlines()[0] if errors.strip() else code}"
    )


async def _py_spy(*arguments: str) -> tuple[int, bytes, str]:
    """Exit code, standard output and standard error. Raises Unreadable if there is none."""
    own_directory = str(Path(sys.executable).parent)
    program = shutil.which("py-spy", path=f"{own_directory}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        raise Unreadable(INSTALL)
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(program, *arguments, stdout=pipe, stderr=pipe)
    try:
        out, err = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
    return child.returncode or 0, out, err.decode(errors="replace")


def _text(threads: Sequence[dict[str, Any]]) -> str:
    return "\n".join(line for thread in threads for line in _lines_of(thread))[:MOST_CHARACTERS]


def _lines_of(thread: dict[str, Any]) -> Iterable[str]:
    """Yield the lines of a thread in the order of a traceback, the most recent call last."""
    does = "works" if thread["active"] else "waits"
    yield f"Thread {thread['os_thread_id']} ({thread['thread_name'] or 'no name'}), {does}:"
    for frame in reversed(thread["frames"]):
        yield f'  File "{frame["filename"]}", line {frame["line"]}, in {frame["name"]}'
