"""Bodies of requests that are read while they are sent, so that no more than a part of them is in memory."""

from collections.abc import Iterator, Sequence
from io import SEEK_END
from typing import Any, BinaryIO, Protocol, TypeGuard

from gpubroker.errors import WrongArgument

PART_BYTES = 2**20


class Body(Protocol):
    size_bytes: int

    def parts(self) -> Iterator[bytes]:
        """Yield all of it, anew at each call: a request may be sent again."""


class FileBody:
    def __init__(self, file: BinaryIO) -> None:
        """The body is the file from its beginning to its end. Raises WrongArgument."""
        if not file.seekable():
            raise WrongArgument("the file cannot be read twice, as a retry may need; copy it to a real file")
        self._file = file
        self.size_bytes = file.seek(0, SEEK_END)

    def parts(self) -> Iterator[bytes]:
        self._file.seek(0)
        while part := self._file.read(PART_BYTES):
            yield part


class BuffersBody:
    """Buffers of bytes one after the other, which are not copied."""

    def __init__(self, buffers: Sequence[bytes | memoryview]) -> None:
        self._views = [memoryview(buffer) for buffer in buffers]
        self.size_bytes = sum(view.nbytes for view in self._views)

    def parts(self) -> Iterator[bytes]:
        for view in self._views:
            for begin in range(0, view.nbytes, PART_BYTES):
                yield bytes(view[begin : begin + PART_BYTES])


def is_binary_file(value: Any) -> TypeGuard[BinaryIO]:
    """Return True if the value is a file that was opened in binary mode. Raises WrongArgument for a file that
    was opened for text."""
    if not hasattr(value, "read") or not hasattr(value, "seek"):
        return False
    if hasattr(value, "encoding"):
        raise WrongArgument("the file was opened for text; open it in binary mode: open(path, 'rb')")
    return True
