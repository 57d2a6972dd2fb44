"""What a node tells of the output of its runs: what is new in a log that somebody reads, and all that is kept
of it when the run has ended."""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

from gpubroker.runtime.messages import Report, RunKey
from gpubroker.runtime.output import STREAMS, Stream

from gpubroker_server.adapters.ray.agent.run_files import RunFiles

ANSWER_BYTES = 256 * 1024
"""The most of one stream in one answer; the leader asks again."""


class Piece(NamedTuple):
    first_byte: int
    data: bytes


class RunLogs:
    def __init__(self, files: RunFiles, limit_bytes: int) -> None:
        """`limit_bytes`: of each stream of a run only the first and the last half of it are told."""
        self._files = files
        self._half_bytes = limit_bytes // 2

    def new(self, key: RunKey, stream: Stream, first_byte: int) -> Report:
        """What a stream has from there on, even if it is nothing."""
        piece = self._read(key, stream, first_byte, ANSWER_BYTES) or Piece(first_byte, b"")
        return logged(key, stream, piece, is_final=False)

    def kept(self, key: RunKey) -> Iterator[Report]:
        """The whole log of a run that has ended: the beginning and the end of each stream."""
        for stream in STREAMS:
            first = self._read(key, stream, 0, self._half_bytes)
            if first is None:
                continue
            yield logged(key, stream, first, is_final=True)
            last = self._read(key, stream, first.first_byte + len(first.data), self._half_bytes)
            if last is not None:
                yield logged(key, stream, last, is_final=True)

    def _read(self, key: RunKey, stream: Stream, first_byte: int, most_bytes: int) -> Piece | None:
        """The next bytes that are told. None if there are none."""
        with contextlib.suppress(OSError), self._files.log_of(key, stream).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if first_byte >= self._half_bytes:
                first_byte = max(first_byte, size - self._half_bytes)
            else:
                most_bytes = min(most_bytes, self._half_bytes - first_byte)
            # The middle of a long log may have been removed.
            begin = os.lseek(file.fileno(), first_byte, os.SEEK_DATA)
            data = os.pread(file.fileno(), most_bytes, begin)
            return Piece(begin, data) if data else None
        return None


def logged(key: RunKey, stream: Stream, piece: Piece, *, is_final: bool) -> Report:
    return ("logged", *key, time.time(), stream, piece.first_byte, piece.data, is_final)
