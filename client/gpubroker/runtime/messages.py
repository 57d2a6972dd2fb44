"""Orders of a node agent to the process of a run, and reports of this process. They are plain tuples, so any
wire carries them.

Every report is a tuple `(kind, task, fence, rank, at, ...)`; `at` is seconds since 1970 on this machine's
clock. The agent forwards reports unchanged.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple

PROTOCOL = 10
"""The number of the form in which agent and run process communicate; the first value of every call of the
agent."""
SPOKEN = (5, 6, 7, 8, 9, PROTOCOL)
"""The forms that this release understands, the newest last. A run outlives the agent that started its
process, and an agent starts processes of the software that is installed by then, so a release also
understands the forms since the last release. Both sides use the newest form that they share."""

TELLS_OUTPUT = 6
"""The first form in which a shared process reports what its runs print."""

RESIZES = 6
"""The first form in which a process knows that ranks may join its task."""

KNOWS_NOTICE = 7
"""The first form in which a process reports a command that ended after the stop notice as stopped, unless the
command reported completion. In earlier forms, exit code 0 was success in any case."""

KNOWS_UPLOADS = 8
"""The first form in which a process knows that its directory is a copy of an upload, whose modules come first
on Python's path."""

STARTS_RAY = 9
"""The first form in which a process starts a Ray cluster for a run that asks for one."""
KNOWS_ENVIRONMENTS = 10
"""The first form in which a process hands its run over to the interpreter of an environment."""

ENDED_WELL = b'{"exit_code":0}'
"""The result of a command that ended with exit code 0."""

URI_CHARS = 2048
ADDRESS_CHARS = 255
PROGRESS_CHARS = 500
MESSAGE_CHARS = 4096
TRACEBACK_BYTES = 64 * 1024
MOST_HELD = 20_000
"""The largest number of items of an array that one run holds."""

Report = tuple[Any, ...]
ItemResult = tuple[int, float, int, bytes | None, tuple[str, str, str] | None]
"""(number, seconds, tries, result, failure) of an item of an array; the failure has the form that `ended`
gives it."""


class RunKey(NamedTuple):
    """Identifies one run: a task's attempt, and its place in a gang."""

    task: str
    fence: int
    rank: int

    def __str__(self) -> str:
        """`task:fence`, or `task:fence:rank` for a rank above 0."""
        return f"{self.task}:{self.fence}:{self.rank}" if self.rank else f"{self.task}:{self.fence}"


OF_DIRECTORIES = ("upload", "outputs")
"""The fields of a RunOrder that concern directories, which earlier releases do not know."""
OF_RAY = ("cpu", "custom")
"""The fields of a RunOrder that only a program with Ray needs. Earlier releases ignore them."""

OF_ENVIRONMENTS = ("environment", "interpreter", "prefix", "brought", "container")
"""The fields of a RunOrder that concern environments, which earlier releases do not know."""


@dataclass(frozen=True, slots=True)
class RunOrder:
    """Everything that one run needs. `leases` are (device UUID, MiB), in the order of CUDA's numbering."""

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
    priority: int = 0
    """The priority of the run. Of the runs that wait for a process, the one with the highest priority gets
    the next."""
    world_size: int = 1
    barrier: bool = False
    """True to report when the process is ready, and to begin user code when all ranks are ready."""
    memory_mb: int = 0
    """The host memory that the run asked for."""
    upload: str = ""
    """The id of the object with the uploaded directory; `working_directory` is the run's copy of this
    directory."""
    outputs: tuple[str, ...] = ()
    """The patterns of the files in the run's directory that are collected at its end."""
    cpu: float | None = None
    """The number of CPUs that the run asked for; None if the order does not say."""
    custom: tuple[tuple[str, float], ...] = ()
    """(name, amount) of the custom resources that the run asked for."""

    environment: str = ""
    """The key of the environment of the run; empty for that of the service."""
    interpreter: str = ""
    """The Python of the environment on this node, as the agent has found or built it; empty in a
    container."""
    prefix: str = ""
    """The directory of the virtual or conda environment; empty if the interpreter belongs to neither."""
    brought: str = ""
    """The directory with this package and cloudpickle for the interpreter of an environment."""
    container: tuple[str, ...] = ()
    """The words before a command that run it in a container; empty without one."""

    @property
    def key(self) -> RunKey:
        return RunKey(self.task, self.fence, self.rank)

    def to_wire(self) -> dict[str, Any]:
        """Return the fields of the order, without those of directories, of Ray and of environments if they
        are empty: earlier releases do not know them."""
        left_out = fields_left_out(self.upload or self.outputs, self.environment)
        if self.cpu is None:
            left_out += OF_RAY
        return {name: getattr(self, name) for name in _names_of(RunOrder) if name not in left_out}

    @classmethod
    def from_wire(cls, given: Mapping[str, Any]) -> "RunOrder":
        return cls(**known_fields(cls, given))


@dataclass(frozen=True, slots=True)
class RunFault:
    """The reason why a run failed. `kind` is a stable token; `message` says what to do, if that is known."""

    kind: str
    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    ending: str
    """The ending of the run: succeeded, failed or stopped; an agent also writes lost and never_started."""
    result: bytes | None = None
    result_format: str = "json"
    """The format of the result: json, cloudpickle or object, which is JSON whose field `object` is the id of
    the object that the result has become."""
    fault: RunFault | None = None


def fields_left_out(directory: object, environment: object) -> tuple[str, ...]:
    """Return the names of the fields of a RunOrder that are not written, because it has no directory, no
    environment or neither: then the value is empty."""
    if environment:
        return () if directory else OF_DIRECTORIES
    return OF_ENVIRONMENTS if directory else OF_DIRECTORIES + OF_ENVIRONMENTS


def known_fields(cls: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a message that a constructor takes. Another release may have written the message:
    fields that this release does not know are left out, and fields that the other release did not know get
    their defaults."""
    return {name: given[name] for name in _names_of(cls) if name in given}


@cache
def _names_of(cls: Any) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass, cached because `fields` computes them at each call."""
    return tuple(f.name for f in fields(cls))


def newest_shared(spoken_there: Iterable[int]) -> int | None:
    """Return the newest form that both sides understand; None if there is none."""
    return max(set(SPOKEN).intersection(spoken_there), default=None)


def failed(kind: str, message: str, traceback: str = "") -> RunOutcome:
    return RunOutcome("failed", fault=RunFault(kind, message, traceback))


def plain_text(text: str, limit: int) -> str:
    """Return the text without surrogates and NUL, cut to `limit` characters, so that every wire, database and
    screen accepts it."""
    return text[:limit].encode(errors="replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def started(key: RunKey, pid: int) -> Report:
    return ("started", *key, time.time(), pid)


def ready(key: RunKey, address: str) -> Report:
    """Report that a rank is ready. `address` is an ip:port on this node on which no process listens yet."""
    return ("ready", *key, time.time(), address)


def progressed(key: RunKey, fraction: float | None, message: str) -> Report:
    return ("progressed", *key, time.time(), fraction, plain_text(message, PROGRESS_CHARS))


def loaded(key: RunKey, running: int, waiting: int, cpu_percent: float, answered: int) -> Report:
    """Report the load of a worker of a set: its calls, its use of one core, and the number of calls it has
    answered."""
    return ("loaded", *key, time.time(), running, waiting, cpu_percent, answered)


def checkpointed(key: RunKey, sequence: int, digest: str, data: bytes | None, uri: str | None) -> Report:
    return ("checkpointed", *key, time.time(), sequence, digest, data, uri)


def items(
    key: RunKey,
    number: int,
    results: Sequence["ItemResult"],
    held: Sequence[tuple[int, int]],
    wanted: int,
) -> Report:
    return ("items", *key, time.time(), number, tuple(results), tuple(held), wanted)


def wanted(key: RunKey, id: str) -> Report:
    """Report that the run waits for the object with this id."""
    return ("wanted", *key, time.time(), id)


def part(key: RunKey, digest: str, size_bytes: int, first_byte: int, data: bytes) -> Report:
    """Report a part of a result that becomes an object with this digest and size."""
    return ("part", *key, time.time(), digest, size_bytes, first_byte, data)


def printed(key: RunKey, output: bytes, errors: bytes) -> Report:
    """Report what a run in a shared process wrote to its two streams since the last such report."""
    return ("printed", *key, time.time(), output, errors)


def ended(key: RunKey, outcome: RunOutcome, log_tail: bytes) -> Report:
    failure, fault = None, outcome.fault
    if fault is not None:
        message = plain_text(fault.message, MESSAGE_CHARS)
        failure = (fault.kind, message, plain_text(fault.traceback, TRACEBACK_BYTES))
    return (
        "ended", *key, time.time(), outcome.ending, outcome.result, outcome.result_format, failure, log_tail,
    )  # fmt: skip


def is_unproven_end(report: Report, protocol: int) -> bool:
    """True if the process speaks this protocol and the report says only that a command ended with exit code
    0: a stop notice may have been the reason."""
    return protocol < KNOWS_NOTICE and report[5:7] == ("succeeded", ENDED_WELL)


def is_report(given: Any) -> bool:
    """True if the value is a report of a run. User code runs in the same process and may have written
    anything."""
    if type(given) is not tuple or len(given) < 5 or type(given[0]) is not str:
        return False
    fields = _FIELDS.get(given[0])
    if fields is None or len(given) != 5 + len(fields) or not _is_key(given[1:4]) or not _is_finite(given[4]):
        return False
    place = 5
    for fits in fields:
        if not fits(given[place]):
            return False
        place += 1
    return True


def carriable(report: Any) -> Report:
    """Return the report; if it is malformed, return an end of its run instead, so that it does not hold up
    other runs."""
    if is_report(report):
        return tuple(report)
    if not isinstance(report, tuple) or not _is_key(report[1:4]):
        return ("nonsense",)
    message = "something in its process wrote a report that cannot be carried; report by current_task() only"
    return ended(RunKey(*report[1:4]), failed("malformed_report", message), b"")


Fits = Callable[[Any], bool]


def _is_key(given: Any) -> bool:
    if len(given) != 3:
        return False
    task, fence, rank = given
    is_numbered = type(fence) is int and type(rank) is int and 0 <= fence < _MOST and 0 <= rank < _MOST
    return is_numbered and type(task) is str


_MOST = 2**31


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_position(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _is_finite(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


def _is_fraction(value: Any) -> bool:
    return _is_finite(value) and 0.0 <= value <= 1.0


def _is_bytes(value: Any) -> bool:
    return type(value) is bytes


def _is_bytes_or_none(value: Any) -> bool:
    return value is None or type(value) is bytes


def _is_ending(value: Any) -> bool:
    return type(value) is str and value in ("succeeded", "failed", "stopped")


def _is_format(value: Any) -> bool:
    return type(value) is str and value in ("json", "cloudpickle", "object")


def _is_text(limit: int) -> Fits:
    return lambda value: type(value) is str and len(value) <= limit and "\0" not in value


def _is_failure_or_none(value: Any) -> bool:
    return value is None or (
        type(value) is tuple
        and len(value) == 3
        and all(fits(v) for fits, v in zip(_FAILURE, value, strict=True))
    )


def _or_none(fits: Fits) -> Fits:
    return lambda value: value is None or fits(value)


_FAILURE = (_is_text(64), _is_text(MESSAGE_CHARS), _is_text(TRACEBACK_BYTES))


def _is_item(item: Any) -> bool:
    # Written out, because an array has many items: a call for each value took half of the agent's time for
    # them.
    if type(item) is not tuple or len(item) != 5:
        return False
    number, seconds, tries, result, failure = item
    return (
        type(number) is int
        and 0 <= number < _MOST
        and type(tries) is int
        and 0 <= tries < _MOST
        and type(seconds) is float
        and math.isfinite(seconds)
        and (result is None or type(result) is bytes)
        and (failure is None or _is_failure_or_none(failure))
    )


def _are_items(value: Any) -> bool:
    return type(value) is tuple and all(map(_is_item, value))


def _are_ranges(value: Any) -> bool:
    if type(value) is not tuple or not all(
        type(pair) is tuple and len(pair) == 2 and all(map(_is_number, pair)) for pair in value
    ):
        return False
    edges = [edge for pair in value for edge in pair]
    is_ascending = edges == sorted(edges) and all(first < end for first, end in value)
    return is_ascending and sum(end - first for first, end in value) <= MOST_HELD


_FIELDS: Mapping[str, tuple[Fits, ...]] = {
    "started": (_is_number,),
    "ready": (_is_text(ADDRESS_CHARS),),
    "progressed": (_or_none(_is_fraction), _is_text(PROGRESS_CHARS)),
    "loaded": (_is_number, _is_number, _is_finite, _is_number),
    "checkpointed": (_is_number, _is_text(64), _is_bytes_or_none, _or_none(_is_text(URI_CHARS))),
    "items": (_is_number, _are_items, _are_ranges, _is_number),
    "wanted": (_is_text(64),),
    "part": (_is_text(64), _is_position, _is_position, _is_bytes),
    "printed": (_is_bytes, _is_bytes),
    "ended": (_is_ending, _is_bytes_or_none, _is_format, _is_failure_or_none, _is_bytes),
}
"""The checks of the values after kind, key and time in each kind of report."""
