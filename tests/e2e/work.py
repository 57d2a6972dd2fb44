"""What the tasks of these tests do. Files are their witnesses: they see what no database can."""

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpubroker import Broker, Stopped, current_task

from examples.gang import all_reduce

if TYPE_CHECKING:
    from gpubroker.runtime.task import Workers  # 0.2.0 has none

PATIENCE_SECONDS = 30.0
"""No rank of a broken gang waits longer for the others."""


def add(a: int, b: int) -> int:
    return a + b


def submit_another(priority: int | str | None = None) -> dict[str, object]:
    """With the access that the service gives to tasks."""
    with Broker() as broker:
        options: dict[str, Any] = {} if priority is None else {"priority": priority}
        child = broker.submit("tests.e2e.work:add", 20, 22, cpu=0.1, **options)
        total = broker.result(child.id, timeout_seconds=PATIENCE_SECONDS)
        access = {"url": broker.connection.url, "token": broker.connection.token}
        return {"child": child.id, "sum": total, **access}


def surroundings() -> dict[str, dict[str, str]]:
    """The environment of this process as it uses it, as the kernel shows it, and that of a child."""
    child = subprocess.run(["cat", "/proc/self/environ"], capture_output=True, check=True)
    shown = Path("/proc/self/environ").read_bytes()
    return {"used": dict(os.environ), "shown": variables_in(shown), "of a child": variables_in(child.stdout)}


def digest_of_variable(name: str) -> dict[str, str]:
    """As this process and a child of it have it."""
    script = f"import hashlib, os; print(hashlib.sha256(os.environ[{name!r}].encode()).hexdigest())"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    return {"process": hashlib.sha256(os.environ[name].encode()).hexdigest(), "child": child.stdout.strip()}


def variables_in(environ: bytes) -> dict[str, str]:
    items = (item.partition("=") for item in environ.decode(errors="replace").split("\0") if item)
    return {name: text for name, _, text in items}


async def add_later(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


def say(name: str, lines: int, pause_seconds: float = 0.0) -> None:
    """So many numbered lines to each stream; others take their turn between any two."""
    for number in range(lines):
        print(f"{name} {number}")
        print(f"{name} {number} error", file=sys.stderr)
        time.sleep(pause_seconds)


def hold_and_say(gate: str) -> None:
    """`before`, and `after` once the gate is there."""
    print("before")
    while not Path(gate).exists():
        time.sleep(0.01)
    print("after")


def fail(message: str) -> None:
    raise ValueError(message)


def fail_as(name: str, message: str) -> None:
    """With an exception of this class name, as a framework does that is not installed here."""
    raise type(name, (RuntimeError,), {})(message)


def take(mb: int) -> None:
    """Host memory, until it is killed."""
    taken = b"x" * (mb * 2**20)
    time.sleep(600.0 if taken else 0.0)


def hold(witness: str, until: str) -> int:
    """Write one line at its start, and return its attempt once the file `until` is there."""
    task = current_task()
    with Path(witness).open("a", encoding="utf-8") as lines:
        lines.write(f"{task.id} {task.attempt}\n")
    while not Path(until).exists():
        if task.should_stop:
            raise Stopped
        time.sleep(0.01)
    return task.attempt


def count(witness: str, enough: str) -> list[int]:
    """Count until the file `enough` is there, one checkpoint a step; every step is witnessed, so that a lost
    or repeated one shows."""
    task = current_task()
    done: list[int] = list(task.resume_state or [])
    while not Path(enough).exists():
        note(witness, str(len(done)))
        done.append(len(done))
        task.checkpoint(done)
        task.progress(message=f"step {len(done)}")
        if task.should_stop:
            raise Stopped
        time.sleep(0.01)
    return done


def add_up(number: float) -> float:
    """What all ranks of a gang make of it together: each gives its rank's multiple, all have the sum."""
    return all_reduce(number * (current_task().rank + 1))


def fail_on(rank: int, witness: str) -> None:
    """One rank fails once all have written their line; the others wait for the notice."""
    task = current_task()
    note(witness, f"{task.rank} began")
    for _ in until_it_is_late():
        if sum("began" in line for line in lines_of(witness)) == task.world_size:
            break
    else:
        raise TimeoutError("not all ranks began")
    if task.rank == rank:
        raise ValueError(f"rank {rank} cannot go on")
    task.wait_for_stop()
    note(witness, f"{task.rank} stopped")
    raise Stopped


def stay(witness: str) -> None:
    """Every rank writes its process and waits for the notice; the second attempt has nothing to do."""
    task = current_task()
    if task.attempt > 1:
        return
    note(witness, f"{task.rank} {os.getpid()}")
    task.wait_for_stop()
    raise Stopped


def hear(witness: str) -> None:
    """Write when it began and when the notice came."""
    note(witness, "began")
    current_task().wait_for_stop()
    note(witness, "heard")
    raise Stopped


def count_together(witness: str, enough: str) -> dict[str, int]:
    """Rank 0 counts and saves, the others keep it company; all resume from what it saved, and go on until the
    file `enough` is there."""
    task = current_task()
    begun_at = step = int(task.resume_state or 0)
    note(witness, f"{task.rank} {task.attempt} {begun_at}")
    while not Path(enough).exists():
        if task.wait_for_stop(0.02):
            raise Stopped
        step += 1
        task.checkpoint(step)
    return {"begun_at": begun_at, "steps": step}


def go_on_with_those_at_work(witness: str) -> list[int]:
    """Every rank writes whom it works with, at its checkpoints; those that are let alone go on until
    `enough`."""
    task = current_task()
    note(witness, f"{task.rank} began")

    def tell(workers: "Workers") -> None:
        note(witness, f"{task.rank} works with {workers.ranks} in {workers.number}")

    task.on_resize(tell)
    if task.rank > 3:
        tell(task.workers)
    while "enough" not in lines_of(witness):
        if task.wait_for_stop(0.02):
            note(witness, f"{task.rank} left")
            raise Stopped
        task.checkpoint()
    return list(task.members)


def until_it_is_late() -> Iterator[None]:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        yield
        time.sleep(0.01)


def note(witness: str, line: str) -> None:
    with Path(witness).open("a", encoding="utf-8") as lines:
        lines.write(line + "\n")


def lines_of(witness: str) -> list[str]:
    return Path(witness).read_text(encoding="utf-8").splitlines()


def stand_still(go: str) -> None:
    """Once told to, as a process that hangs does: nothing of it runs any more, and it does not end."""
    while not Path(go).exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGSTOP)


def note_item(item: int, witness: str, pause_seconds: float = 0.0, bad: str = "") -> int:
    """Write a line for the item, and fail, crash or hang for the one that `bad` names, such as `crash 7`."""
    with Path(witness).open("a", encoding="utf-8") as lines:
        lines.write(f"{os.getpid()} {item}\n")
    how, _, number = bad.partition(" ")
    if how and item == int(number):
        match how:
            case "fail":
                raise ValueError(f"item {item} is bad")
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "spin":
                while True:
                    pass
            case "hang":
                time.sleep(600)
    time.sleep(pause_seconds)
    return item * item


def crash_when_told(item: int, witness: str, gate: str) -> None:
    """The last item crashes once the gate is there."""
    note_item(item, witness)
    while item and not Path(gate).exists():
        time.sleep(0.01)
    if item:
        os.kill(os.getpid(), signal.SIGKILL)


class HangsOnce:
    """Whose first object is never made."""

    def __init__(self, witness: str) -> None:
        if not Path(witness).exists():
            note(witness, str(os.getpid()))
            time.sleep(86_400)

    def pid(self) -> int:
        return os.getpid()


class Counter:
    """What workers of a set are made of."""

    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, number: int) -> int:
        self.value += number
        return self.value

    def pid(self) -> int:
        return os.getpid()

    def hold(self, witness: str, until: str) -> int:
        """Note its process, and return it once the file `until` is there."""
        note(witness, str(os.getpid()))
        while not Path(until).exists():
            time.sleep(0.01)
        return os.getpid()

    def spin(self, _witness: str, until: str) -> None:
        """Use the CPU until the file `until` is there."""
        while not Path(until).exists():
            sum(range(100_000))

    def is_healthy(self) -> bool:
        return self.value >= 0

    def crash(self) -> None:
        os._exit(1)


def where_it_lies(array: Any) -> dict[str, Any]:
    """In which file's bytes of this process's memory it is."""
    refused = ""
    try:
        array[0] = 7
    except ValueError as fault:
        refused = str(fault)
    at = array.ctypes.data
    file: list[Any] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, inode, *_ = line.split()
        begin, end = (int(edge, 16) for edge in span.split("-"))
        if begin <= at < end:
            file = [int(inode), int(offset, 16) + at - begin]
    node = os.environ.get("GPUBROKER_NODE", "")
    return {"sum": float(array.sum()), "refused": refused, "pid": os.getpid(), "node": node, "file": file}


def size_of(value: Any) -> int:
    return len(value)


def text_of(size: int) -> str:
    return "x" * size


def want_ray() -> dict[str, str]:
    """What each way to Ray says in this process: the exception, or what it gave."""
    ray = import_module("ray")

    @ray.remote  # type: ignore[untyped-decorator]  # Ray has no types
    def add(a: int, b: int) -> int:
        return a + b

    ways: dict[str, Callable[[], object]] = {
        "init": ray.init,
        "again": lambda: ray.init(ignore_reinit_error=True),
        "auto": lambda: ray.init(address="auto"),
        "put": lambda: ray.put(1),
        "remote": lambda: ray.get(add.remote(1, 2)),
        "actor": lambda: ray.get_actor("x"),
        "nodes": ray.nodes,
        "context": ray.get_runtime_context,
    }
    assert not ray.is_initialized()
    ray.shutdown()
    return {name: _said_by(way) for name, way in ways.items()}


def _said_by(way: Callable[[], object]) -> str:
    try:
        return repr(way())
    except Exception as fault:
        return f"{type(fault).__name__}: {fault}"


def variables_of_ray(_item: object = None) -> dict[str, dict[str, str]]:
    """Those of this process, as the kernel shows it, and of a child."""
    return {
        place: {name: text for name, text in env.items() if name.startswith("RAY_")}
        for place, env in surroundings().items()
    }


class WantsRay:
    """What a worker of a set is made of."""

    def want_ray(self) -> dict[str, str]:
        return want_ray()

    def variables_of_ray(self) -> dict[str, dict[str, str]]:
        return variables_of_ray()
