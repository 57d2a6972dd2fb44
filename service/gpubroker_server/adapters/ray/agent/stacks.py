"""The stacks of a run's Python threads. py-spy reads them from outside while the threads go on.

So the stack of a thread that never releases the interpreter's lock can be read too, and that of a command
that runs Python.
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
"""The number of tries to read a process. A read may fail because the threads go on meanwhile."""
MOST_PROCESSES = 16
MOST_CHARACTERS = 100_000
NOT_PYTHON = "Failed to find python version"
INSTALL = "py-spy is not installed beside the Python of its node; pip install 'gpubroker-server[ray]' there"
NOT_ALLOWED = (
    "its node's agent may not read the memory of its process: the agent needs CAP_SYS_PTRACE, or the same "
    "user as the run and kernel.yama.ptrace_scope=0"
)


class Unreadable(Exception):
    """The stacks cannot be read. The message says why."""


async def tell_stack(
    run: AgentRun | None, key: RunKey, request: str, report: Callable[[Report], None]
) -> None:
    stack, message = await stack_of(run)
    report(("stack", *key, time.time(), request, stack, message))


async def stack_of(run: AgentRun | None) -> tuple[str, str]:
    """Return the stacks as text and an empty message, or an empty text and the reason."""
    if run is None or run.process is None or run.has_ended:
        return "", "it has no process now"
    root = run.process.watched.id.pid
    try:
        async with asyncio.timeout(READ_SECONDS):
            if run.order.kind == "command" or run.order.interpreter:
                return await _stacks_below(root)
            threads = await _threads_of(root)
    except (Unreadable, TimeoutError) as fault:
        return "", str(fault) or f"its process could not be read within {READ_SECONDS:g} s"
    if run.shared:  # the process also has threads of other runs
        threads = [thread for thread in threads if thread["thread_name"] == str(run.key)]
    return (_text(threads), "") if threads else ("", "its thread is not there: it begins or ends just now")


async def _stacks_below(root: int) -> tuple[str, str]:
    """Return the stacks of those processes of a command that run Python and an empty message, or an empty
    text and the reason."""
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
    """Return the threads of a process as py-spy reads them. Raises Unreadable."""
    errors = ""
    for _ in range(TRIES):
        code, out, errors = await _py_spy("dump", "--json", "--nonblocking", "--pid", str(pid))
        if code == 0:
            threads: list[dict[str, Any]] = json.loads(out)
            return threads
        if NOT_PYTHON in errors:
            raise Unreadable(NOT_PYTHON)
        if "ermission" in errors or "not permitted" in errors:
            raise Unreadable(NOT_ALLOWED)
    raise Unreadable(
        f"its process could not be read: {errors.strip().splitlines()[0] if errors.strip() else code}"
    )


async def _py_spy(*arguments: str) -> tuple[int, bytes, str]:
    """Run py-spy, and return its exit code, standard output and standard error. Raises Unreadable if it is
    not installed."""
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
