"""Ids that sort by time: a prefix and 26 lowercase Crockford base32 characters of a UUIDv7 (RFC 9562)."""

import base64
import re
import secrets

from service.core.units import Instant, TaskId

_TO_CROCKFORD = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", b"0123456789abcdefghjkmnpqrstvwxyz")
_VERSION_7 = 0x7 << 76
_VARIANT = 0b10 << 62
_COUNTER_TOP = 0xFFF

TASK_ID_PATTERN = r"^task_[0-7][0-9a-hjkmnp-tv-z]{25}$"
_TASK_ID = re.compile(TASK_ID_PATTERN)


class Ids:
    """Makes ids that never repeat and, within this process, never go back, even if the clock does."""

    def __init__(self) -> None:
        self._ms = 0
        self._counter = 0

    def task(self, now: Instant) -> TaskId:
        return TaskId("task_" + self._next(now))

    def request(self, now: Instant) -> str:
        return "req_" + self._next(now)

    def _next(self, now: Instant) -> str:
        """48 bits of milliseconds, a 12-bit counter within the millisecond, 62 random bits."""
        ms = int(now * 1000)
        if ms > self._ms:
            self._ms, self._counter = ms, 0
        elif self._counter < _COUNTER_TOP:
            self._counter += 1
        else:
            self._ms, self._counter = self._ms + 1, 0
        value = self._ms << 80 | _VERSION_7 | self._counter << 64 | _VARIANT | secrets.randbits(62)
        # 20 bytes are 32 base32 characters, of which the first 6 (30 zero bits) say nothing.
        return base64.b32encode(value.to_bytes(20, "big"))[6:].translate(_TO_CROCKFORD).decode()


def is_task_id(text: str) -> bool:
    return _TASK_ID.fullmatch(text) is not None
