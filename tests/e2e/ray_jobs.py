"""What the runs of the Ray tests do."""

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpubroker import Stopped, current_task

from examples.gang import all_reduce


def add(a: float, b: float) -> float:
    return a + b


async def add_slowly(a: float, b: float) -> float:
    await asyncio.sleep(0.01)
    return a + b


def who() -> dict[str, Any]:
    """What a run sees of itself."""
    task = current_task()
    return {
        "id": task.id,
        "attempt": task.attempt,
        "devices": list(task.devices),
        "cuda": os.environ["CUDA_VISIBLE_DEVICES"],
        "greeting": os.environ.get("GREETING"),
        "uid": os.getuid(),
        "directory": os.getcwd(),
    }


def variables(names: list[str]) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def limits_seen(folder: str) -> dict[str, Any]:
    """What frameworks are told, here and in a child; `folder` has one that stands in for PyTorch."""
    sys.path.insert(0, folder)
    torch = importlib.import_module("torch")
    script = "import json, torch; print(json.dumps(torch.cuda.calls))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), folder])}
    child = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, check=True)
    jax = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    return {"here": torch.cuda.calls, "in a child": json.loads(child.stdout), "jax": jax}


def give(value: str) -> Any:
    """Results that are hard to carry, by name."""
    makers: dict[str, Callable[[], Any]] = {
        "lock": __import__("threading").Lock,
        "nan": lambda: float("nan"),
        "set": lambda: {1, 2},
        "large": lambda: "x" * 3_000_000,
    }
    return makers[value]()


def fail(message: str) -> None:
    print("before the fault")
    raise ValueError(message)


BURNERS = 8
"""More than the machines of these tests give them cores."""


def burn(seconds: float) -> int:
    """Keep every core busy, in this process without ever letting go of the interpreter's lock."""
    until = time.monotonic() + seconds
    others = [
        subprocess.Popen([sys.executable, "-c", f"import time\nwhile time.monotonic() < {until}: pass"])
        for _ in range(BURNERS)
    ]
    sys.setswitchinterval(seconds)
    while time.monotonic() < until:
        pass
    return sum(other.wait() for other in others)


def leave(code: int | str | None = 3) -> None:
    sys.exit(code)


def say(text: str) -> None:
    print(text)


def crash(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def end_at_once(code: int) -> None:
    """Without the interpreter's usual end."""
    os._exit(code)


def take(mb: int) -> None:
    """Host memory, until it is stopped."""
    taken = bytearray(mb * 2**20)
    taken[:: os.sysconf("SC_PAGE_SIZE")] = b"x" * len(range(0, len(taken), os.sysconf("SC_PAGE_SIZE")))
    current_task().wait_for_stop()
    raise Stopped


TAKES = "import sys; taken = b'x' * ({} * 2**20); print(len(taken), flush=True); sys.stdin.read()"


def take_in_children(sizes_mb: list[int], witness: str) -> None:
    """A child takes so much host memory for each size; the file is there once all have it."""
    commands = [[sys.executable, "-c", TAKES.format(mb)] for mb in sizes_mb]
    pipe = subprocess.PIPE
    children = [subprocess.Popen(command, stdin=pipe, stdout=pipe) for command in commands]
    assert all(child.stdout is not None and child.stdout.readline() for child in children)
    Path(witness).touch()
    current_task().wait_for_stop()
    raise Stopped


def wait_for_file(path: str) -> str:
    """Until somebody makes the file."""
    while not Path(path).exists():
        time.sleep(0.01)
    return "seen"


def last_byte_once_seen(data: memoryview, path: str) -> int:
    """Of an object that it has had since before the file was made."""
    Path(path).with_suffix(".has").touch()
    wait_for_file(path)
    return data[-1]


def wait(seconds: float = 0.0) -> None:
    """So long, unless it is given notice."""
    if current_task().wait_for_stop(seconds):
        raise Stopped


def count_until_stopped() -> None:
    """Counts on from its checkpoint; saves and gives way when asked to."""
    task = current_task()
    count = (task.resume_state or {"count": 0})["count"]
    while not task.wait_for_stop(0.01):
        count += 1
        task.progress(message=f"counted {count}")
    task.checkpoint({"count": count})
    raise Stopped


def finish_after_notice() -> str:
    current_task().wait_for_stop()
    return "finished anyway"


def ignore_the_notice() -> None:
    current_task().progress(0.5, "deaf")
    while True:
        time.sleep(0.05)


def resume() -> Any:
    return current_task().resume_state


def save(count: int) -> None:
    task = current_task()
    for number in range(count):
        task.progress(number / count)
        task.checkpoint(b"state %d" % number)


def save_too_much() -> None:
    current_task().checkpoint(b"x" * 2_000_000)


def hand_over(uri: str) -> None:
    current_task().checkpoint(uri=uri)


def forge_a_report() -> None:
    """As a mistake in a library that knows the runtime too well might."""
    task = current_task()
    task._journal.add(("checkpointed", *task._key, 1.0, 7, "digest", None, Path("/data")))
    task.wait_for_stop()


def leave_children_behind() -> dict[str, int]:
    """One in a session of its own, one that was only forked: neither dies with its parent."""
    started = subprocess.Popen(["sleep", "300"], start_new_session=True)
    forked = os.fork()
    if forked == 0:
        os.setsid()
        while True:
            time.sleep(1)
    return {"run": os.getpid(), "started": started.pid, "forked": forked}


def where_am_i() -> dict[str, Any]:
    """What a run sees of its place among others."""
    task = current_task()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
    return {
        "rank": task.rank,
        "world_size": task.world_size,
        "meet": task.rank_zero_address,
        "environment": [os.environ.get(name) for name in names],
    }


def keep_a_state() -> Any:
    """Each rank hands over its own; what the first one handed over comes back to all."""
    task = current_task()
    if task.resume_state is None:
        task.checkpoint(f"of rank {task.rank}")
    return task.resume_state


def add_up_all_ranks(number: float) -> float:
    """An all-reduce as libraries do it: rank 0 listens, the others come, everybody has the sum."""
    return all_reduce(number * (current_task().rank + 1))
