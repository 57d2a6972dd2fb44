"""Ids that sort by time: a prefix and 26 lowercase Crockford base32 characters of a UUIDv7 (RFC 9562)."""

import re
from random import Random

from gpubroker_server.core.domain.units import Instant, TaskId

_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = tuple(first + second for first in _CROCKFORD for second in _CROCKFORD)
_SHIFTS = range(120, -1, -10)
"""The shifts of 13 pairs of characters, which hold 130 bits; the two highest bits are always 0."""

_VERSION_7 = 0x7 << 76
_VARIANT = 0b10 << 62
_COUNTER_TOP = 0xFFF

_NUMBERED_BITS = 20
"""The bits of four characters."""

_TASK_ID = re.compile(r"task_[0-7][0-9a-hjkmnp-tv-z]{25}")


class Ids:
    """Makes unique ids. Within this process they ascend, even if the clock goes back."""

    def __init__(self) -> None:
        self._ms = 0
        self._counter = 0
        self._random = Random()  # noqa: S311  # ids are unique, not secret

    def task(self, now: Instant) -> TaskId:
        return TaskId("task_" + self._next(now))

    def tasks(self, now: Instant, count: int) -> list[TaskId]:
        """Return `count` ids that begin alike and end in ascending numbers (RFC 9562, 6.2)."""
        first = "task_" + self._next(now)
        start = self._random.randrange((1 << _NUMBERED_BITS) - count)
        numbers = range(start, start + count)
        return [TaskId(f"{first[:-4]}{_PAIRS[n >> 10]}{_PAIRS[n & 0x3FF]}") for n in numbers]

    def request(self, now: Instant) -> str:
        """Return the id of a request to the leader. Ids of HTTP requests begin with `req_` instead."""
        return "ask_" + self._next(now)

    def exchange(self) -> str:
        """Return the id of one HTTP request, for its answer and the log. These ids are unique but do not
        ascend, which makes them cheaper."""
        return f"req_{self._random.getrandbits(104):026x}"

    def _next(self, now: Instant) -> str:
        """Return the next id, which consists of 48 bits of milliseconds, a 12-bit counter within the
        millisecond, and 62 random bits."""
        ms = int(now * 1000)
        if ms > self._ms:
            self._ms, self._counter = ms, 0
        elif self._counter < _COUNTER_TOP:
            self._counter += 1
        else:
            self._ms, self._counter = self._ms + 1, 0
        value = self._ms << 80 | _VERSION_7 | self._counter << 64 | _VARIANT | self._random.getrandbits(62)
        return "".join([_PAIRS[value >> shift & 0x3FF] for shift in _SHIFTS])


def is_task_id(text: str) -> bool:
    return _TASK_ID.fullmatch(text) is not None
