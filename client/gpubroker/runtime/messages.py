"""What a node agent says to the process of a run, and hears from it. Plain tuples, so any wire carries them.

Every report is a tuple `(kind, task, fence, rank, at, ...)`; `at` is seconds since 1970 on this machine's
clock. The agent passes reports on as they are.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

PROTOCOL = 1
"""First value of every message between agent and run process. Another number is refused."""

Report = tuple[Any, ...]


class RunKey(NamedTuple):
    """Names one run: a task's attempt, and its place in a gang."""

    task: str
    fence: int
    rank: int

    def __str__(self) -> str:
        return f"{self.task}:{self.fence}"


@dataclass(frozen=True, slots=True)
class RunOrder:
    """Everything one run needs. `leases` are (device UUID, MiB), in the order of CUDA's numbering."""

    task: str
    fence: int
    kind: str
    rank: int = 0
    entrypoint: str = ""
    command: tuple[str, ...] = ()
    arguments: bytes = b""
    python: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    result_format: str = "json"
    working_directory: str = ""
    resume_state: bytes | None = None
    resume_uri: str | None = None
    attempt: int = 1
    name: str = ""
    tenant: str = ""
    leases: tuple[tuple[str, int], ...] = ()
    result_limit_bytes: int = 64 * 1024 * 1024
    checkpoint_limit_bytes: int = 16 * 1024 * 1024

    @property
    def key(self) -> RunKey:
        return RunKey(self.task, self.fence, self.rank)

    def to_wire(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a run failed. `kind` is a stable token, `message` says what to do where that is known."""

    kind: str
    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: succeeded, failed or stopped."""

    ending: str
    result: bytes | None = None
    result_format: str = "json"
    fault: Fault | None = None


def failed(kind: str, message: str, traceback: str = "") -> Outcome:
    return Outcome("failed", fault=Fault(kind, message, traceback))


def started(key: RunKey, pid: int) -> Report:
    return ("started", *key, time.time(), pid)


def progressed(key: RunKey, fraction: float | None, message: str) -> Report:
    return ("progressed", *key, time.time(), fraction, message)


def checkpointed(key: RunKey, sequence: int, digest: str, data: bytes | None, uri: str | None) -> Report:
    return ("checkpointed", *key, time.time(), sequence, digest, data, uri)


def ended(key: RunKey, outcome: Outcome, log_tail: bytes) -> Report:
    fault = outcome.fault
    failure = None if fault is None else (fault.kind, fault.message, fault.traceback)
    return (
        "ended", *key, time.time(), outcome.ending, outcome.result, outcome.result_format, failure, log_tail,
    )  # fmt: skip
