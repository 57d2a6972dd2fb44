"""The handle a running task has on itself: progress, checkpoints and the notice to stop."""

import contextvars
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import cloudpickle

from gpubroker.run_reports import share_of
from gpubroker.runtime.carrying import faulty_part, is_not_pickled
from gpubroker.runtime.journal import AT_ONCE, Journal
from gpubroker.runtime.messages import (
    URI_CHARS,
    RunKey,
    RunOrder,
    checkpointed,
    plain_text,
    progressed,
)

_PLAIN, _PICKLED = b"\x00", b"\x01"
"""The first byte of a saved state: whether bytes or a cloudpickle follows."""


class Stopped(BaseException):
    """Raise it to obey a stop notice; a preempted run is resumed later from its newest checkpoint.

    It is no `Exception`, so that a training loop's `except Exception` does not catch it.
    """


class NoCurrentTask(RuntimeError):
    """`current_task()` was called outside of a task."""


class CheckpointTooLarge(ValueError):
    """The state exceeds the limit for checkpoints; nothing was saved."""


_CURRENT: contextvars.ContextVar["RunningTask"] = contextvars.ContextVar("gpubroker_task")
_only_task: "RunningTask | None" = None


def current_task() -> "RunningTask":
    """Return the task that this code runs in. Raises NoCurrentTask outside of a task.

    The function works in the task's own thread, in its coroutines and in `asyncio.to_thread`. In a process of
    its own (a task with a GPU, a whole CPU or an `env`) it also works in threads that the task starts itself.
    """
    task = _CURRENT.get(None) or _only_task
    if task is None:
        raise NoCurrentTask(
            "no task runs here: current_task() works inside a function that gpubroker started; a thread that "
            "a small task starts by itself needs contextvars.copy_context().run"
        )
    return task


def environment() -> Mapping[str, str]:
    """Return the environment of this process and of the current task. If several tasks share the process, its
    own environment lacks their variables."""
    task = _CURRENT.get(None) or _only_task
    return os.environ if task is None else {**os.environ, **task.env}


def enter_task(task: "RunningTask") -> contextvars.Token["RunningTask"]:
    return _CURRENT.set(task)


def leave_task(token: contextvars.Token["RunningTask"]) -> None:
    _CURRENT.reset(token)


def own_process(task: "RunningTask") -> None:
    """Make the task the current one of every thread: this process runs nothing else."""
    global _only_task
    _only_task = task


class Workers(NamedTuple):
    """The ranks at work in a task with several ranks."""

    number: int
    """The number of the world of these ranks: 0 at the start, higher after each change, the same in every
    rank."""
    ranks: tuple[int, ...]


class RunningTask:
    """One run, as its own code sees it. Every method may be called from any thread."""

    def __init__(self, order: RunOrder, journal: Journal) -> None:
        self._order = order
        self._journal = journal
        self._stop = threading.Event()
        self._released = threading.Event()
        """Set when the task no longer waits for other ranks."""
        self._rank_zero_address = ""
        self._world = Workers(0, tuple(range(order.world_size)))
        self._world_changed = threading.Event()
        self._told_of = 0
        """The number of the newest world that was given to the callbacks."""
        self._on_resize: list[Callable[[Workers], None]] = []
        self._lock = threading.Lock()
        self._saved = 0
        self._on_stop: list[Callable[[], None]] = []

    @property
    def id(self) -> str:
        return self._order.task

    @property
    def attempt(self) -> int:
        """The number of the attempt: 1 for the first start; one more for every later start."""
        return self._order.attempt

    @property
    def name(self) -> str:
        return self._order.name

    @property
    def tenant(self) -> str:
        return self._order.tenant

    @property
    def env(self) -> Mapping[str, str]:
        """The variables of the task, including those that the service set."""
        return {"GPUBROKER_TASK": self.id, **self._order.env}

    @property
    def devices(self) -> tuple[str, ...]:
        """The UUIDs of the task's GPUs; the first is `cuda:0` in this process."""
        return tuple(uuid for uuid, _mb in self._order.leases)

    @property
    def rank(self) -> int:
        """The task's place among its processes, from 0; always 0 if there is only one."""
        return self._order.rank

    @property
    def world_size(self) -> int:
        """The number of `members`."""
        return len(self._world.ranks)

    @property
    def workers(self) -> "Workers":
        """The ranks at work, as far as this rank knows, and the number of their world. While a task with
        `min_ranks` runs, ranks beyond these may be told to leave, and ranks with new numbers may join."""
        return self._world

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of `workers`, in order."""
        return self._world.ranks

    @property
    def world_changed(self) -> bool:
        """True if ranks have joined or left since the start, or since `accept_world` was last called."""
        return self._world_changed.is_set()

    def accept_world(self) -> tuple[int, ...]:
        """Return the ranks at work, and make `world_changed` False until further ranks join or leave."""
        self._tell_of_resize()
        with self._lock:
            self._world_changed.clear()
            return self._world.ranks

    def on_resize(self, callback: Callable[["Workers"], None]) -> None:
        """Call `callback` with the newest world after ranks have joined or left, in the thread and at the
        time of the next `checkpoint` or `accept_world` of this rank."""
        with self._lock:
            self._on_resize.append(callback)

    @property
    def rank_zero_address(self) -> str:
        """`host:port` on the node of rank 0, at which all ranks can meet: rank 0 may listen there. Empty if
        the task has only one process."""
        return self._rank_zero_address

    def progress(self, fraction: float | None = None, message: str = "") -> None:
        """Report progress: a fraction (0..1), a message, or both. Reports are cheap: only the newest is sent,
        ten times a second.

        Raises ValueError for a fraction that lies outside 0..1 by more than rounding.
        """
        known = None if fraction is None else share_of(float(fraction))
        self._journal.note(self._key, progressed(self._key, known, str(message)))

    def checkpoint(self, state: Any = None, *, uri: str | os.PathLike[str] | None = None) -> None:
        """Save `state` (bytes, or anything that cloudpickle can carry), or report with `uri` where the state
        was saved.

        The state is copied before this returns. A moment later it is on the broker's disk, unless a newer
        state replaces it before. A later attempt finds the newest state as `resume_state` or `resume_uri`.
        Only rank 0 saves, for all ranks. In any rank, callbacks of `on_resize` that are due are called first.
        Raises CheckpointTooLarge over the limit, TypeError or ValueError for an invalid `uri`.
        """
        self._tell_of_resize()
        if self._order.rank > 0:
            return
        address = None if uri is None else _address(uri)
        data = None if address is not None else self._packed(state)
        digest = hashlib.sha256((address or "").encode() if data is None else data).hexdigest()
        with self._lock:
            self._saved += 1
            report = checkpointed(self._key, self._saved, digest, data, address)
            self._journal.note(self._key, report, AT_ONCE)

    @property
    def resume_state(self) -> Any:
        """Return the state of the newest checkpoint; None at the first start, or if the checkpoint has a
        `uri` instead."""
        data = self._order.resume_state
        if data is None:
            return None
        return cloudpickle.loads(data[1:]) if data[:1] == _PICKLED else data[1:]

    @property
    def resume_uri(self) -> str | None:
        return self._order.resume_uri

    @property
    def should_stop(self) -> bool:
        """True if a stop notice was given: save your work and `raise Stopped` within the grace period."""
        return self._stop.is_set()

    def wait_for_stop(self, timeout_seconds: float | None = None) -> bool:
        """Sleep until a stop notice is given; return True if it was, and False after `timeout_seconds`."""
        return self._stop.wait(timeout_seconds)

    def give_notice(self) -> None:
        """Give the stop notice. Only the process that runs the task calls this, not the task."""
        with self._lock:
            self._stop.set()
            callbacks, self._on_stop = self._on_stop, []
        self._released.set()
        for callback in callbacks:
            callback()

    def go(self, rank_zero_address: str) -> None:
        """Let the task begin, since all ranks are ready. Only the process that runs the task calls this. Only
        the first call counts."""
        if not self._rank_zero_address:
            self._rank_zero_address = rank_zero_address
            self._released.set()

    def resize(self, ranks: Iterable[int], number: int | None = None) -> None:
        """Note the ranks that are at work. Only the process that runs the task calls this. Without a number,
        ranks have only left. A world older than the known one is ignored."""
        at_work = tuple(sorted(ranks))
        if number is None:
            number = self._order.world_size - len(at_work)
        with self._lock:
            if number > self._world.number:
                self._world = Workers(number, at_work)
                if self._rank_zero_address:  # else the task begins with this world
                    self._world_changed.set()
                else:
                    self._told_of = number

    def wait_for_go(self) -> bool:
        """Wait until all ranks are ready and return True; return False if the task has to stop instead."""
        self._released.wait()
        return bool(self._rank_zero_address)

    def call_on_stop(self, callback: Callable[[], None]) -> None:
        """Call `callback` when a stop notice is given, or at once if it already was."""
        with self._lock:
            if not self._stop.is_set():
                self._on_stop.append(callback)
                return
        callback()

    def _tell_of_resize(self) -> None:
        with self._lock:
            world, callbacks = self._world, tuple(self._on_resize)
            is_newer, self._told_of = world.number > self._told_of, world.number
        for callback in callbacks if is_newer else ():
            callback(world)

    @property
    def _key(self) -> RunKey:
        return self._order.key

    def _packed(self, state: Any) -> bytes:
        plain = isinstance(state, bytes | bytearray | memoryview)
        try:
            data = _PLAIN + bytes(state) if plain else _PICKLED + cloudpickle.dumps(state)
        except Exception as fault:
            part = faulty_part([("the state", state)], is_not_pickled) or "the state"
            fault.add_note(f"checkpoint(state): {part} cannot be pickled; leave it out, or pass plain data")
            raise
        limit = self._order.checkpoint_limit_bytes
        if len(data) > limit:
            raise CheckpointTooLarge(
                f"the state takes {len(data) / 2**20:.1f} MiB and the limit is {limit / 2**20:.1f} MiB; save "
                "it where the next attempt can read it and hand over its address: checkpoint(uri=...)"
            )
        return data


def _address(uri: str | os.PathLike[str]) -> str:
    text = os.fspath(uri)
    if not isinstance(text, str):
        raise TypeError(f"a checkpoint's uri is text or a path, not {type(text).__name__}")
    if not isinstance(uri, str) or (":" not in text and os.path.exists(text)):
        text = os.path.abspath(text)  # the next attempt, and the disk guard, may work in other directories
    plain = plain_text(text, URI_CHARS)
    if not plain or plain != text:
        raise ValueError(
            f"a checkpoint's uri has 1 to {URI_CHARS} characters, all of them valid text without NUL; this "
            f"one has {len(text)}: {plain[:80]!r}"
        )
    return plain
