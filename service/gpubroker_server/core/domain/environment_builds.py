"""Rules for preparing environments on a node: when to try again, what to say of a failure, and what to remove
when the cache is full."""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from gpubroker_server.core.domain.environment import MESSAGE_CHARS
from gpubroker_server.core.domain.units import Seconds

RETRY_PAUSES_SECONDS: tuple[Seconds, ...] = (Seconds(2.0), Seconds(10.0), Seconds(30.0), Seconds(60.0))
"""The pauses before a build is tried again after a failure of the network."""
_NETWORK = re.compile(
    r"error sending request|failed to fetch|connection (refused|reset|closed)|connect error|dns error"
    r"|name resolution|timed? ?out|network (is )?unreachable|http status server error|\b50[234]\b"
    r"|error decoding response body",
    re.IGNORECASE,
)
_NOT_NETWORK = re.compile(
    r"no solution found|HTTP status client error|network connectivity is disabled|peer certificate"
    r"|not found in the (package )?registry",
    re.IGNORECASE,
)
"""Failures that a repetition would not change, even if their text mentions the network too."""
STEPS = (
    ("Resolved ", "downloading packages"),
    ("Prepared ", "installing packages"),
    ("Installed ", "about to end"),
)
"""The step that follows each line of uv. A line begins with one of these words."""


def is_of_network(output: str) -> bool:
    """Return True if a build failed because of the network, by what it printed."""
    return _NETWORK.search(output) is not None and _NOT_NETWORK.search(output) is None


def retry_pause(failures: int, output: str) -> Seconds | None:
    """Return the pause before a build is tried again; None if it has failed for good. `failures` is the
    number of failures so far, `output` what the last try printed."""
    if failures > len(RETRY_PAUSES_SECONDS) or not is_of_network(output):
        return None
    return RETRY_PAUSES_SECONDS[failures - 1]


def step_after(line: str) -> str:
    """Return the step that begins after a line of uv; empty if the line begins none."""
    return next((step for words, step in STEPS if line.lstrip().startswith(words)), "")


def why_failed(program: Sequence[str], output: str, code: int) -> str:
    """Return the message of a failed build: the end of what it printed, from its first error on."""
    lines = output.strip().splitlines()
    starts = (number for number, line in enumerate(lines) if _begins_error(line))
    text = "\n".join(lines[next(starts, max(0, len(lines) - 20)) :])
    said = text or f"{' '.join(program)} ended with exit code {code} and said nothing"
    return said if len(said) <= MESSAGE_CHARS - 200 else f"...{said[-(MESSAGE_CHARS - 200) :]}"


def _begins_error(line: str) -> bool:
    return line.lstrip().lower().startswith(("error", "×", "x ", "hint"))


class CachedEnvironment(NamedTuple):
    key: str
    size_bytes: int
    used_at: float
    """The time when a run last began in it, or when it was built."""


def to_remove(cached: Iterable[CachedEnvironment], in_use: Collection[str], most_bytes: int) -> list[str]:
    """Return the keys of the environments to remove so that the rest takes at most `most_bytes`, the least
    recently used ones first. One in use is never removed, and the newest one stays."""
    newest_first = sorted(cached, key=lambda entry: (-entry.used_at, entry.key))
    removed: list[str] = []
    excess_bytes = sum(entry.size_bytes for entry in newest_first) - most_bytes
    for entry in reversed(newest_first[1:]):
        if excess_bytes <= 0:
            break
        if entry.key not in in_use:
            removed.append(entry.key)
            excess_bytes -= entry.size_bytes
    return removed
