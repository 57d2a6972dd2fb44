"""Bodies of requests that are read while they are sent, so that only a part of each is in memory."""

from collections.abc import Iterator, Sequence
from io import SEEK_END
from typing import Any, BinaryIO, Protocol, TypeGuard

from gpubroker.errors import WrongArgument

PART_BYTES = 2**20


class Body(Protocol):
    size_bytes: int

    def parts(self) -> Iterator[bytes]:
        """Yield the whole body, from its beginning at each call, because a request may be sent again."""


class FileBody:
    def __init__(self, file: BinaryIO) -> None:
        """Make the body from the whole file. Raises WrongArgument if the file cannot be read repeatedly."""
        if not file.seekable():
            raise WrongArgument("the file cannot be read twice, as a retry may need; copy it to a real file")
        self._file = file
        self.size_bytes = file.seek(0, SEEK_END)

    def parts(self) -> Iterator[bytes]:
        self._file.seek(0)
        while part := self._file.read(PART_BYTES):
            yield part


class BuffersBody:
    """A body of several buffers in sequence, which are not copied."""

    def __init__(self, buffers: Sequence[bytes | memoryview]) -> None:
        self._views = [memoryview(buffer) for buffer in buffers]
        self.size_bytes = sum(view.nbytes for view in self._views)

    def parts(self) -> Iterator[bytes]:
        for view in self._views:
            for begin in range(0, view.nbytes, PART_BYTES):
                yield bytes(view[begin : begin + PART_BYTES])


def is_binary_file(value: Any) -> TypeGuard[BinaryIO]:
    """True if the value is a file that was opened in binary mode. Raises WrongArgument for a file that was
    opened for text."""
    if not hasattr(value, "read") or not hasattr(value, "seek"):
        return False
    if hasattr(value, "encoding"):
        raise WrongArgument("the file was opened for text; open it in binary mode: open(path, 'rb')")
    return True
