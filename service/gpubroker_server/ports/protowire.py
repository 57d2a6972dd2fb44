"""Protobuf on the wire, for the few messages that are looked into or made here: fields by number.

Triton's whole schema, and a library that knows it, would be a dependency of all who start the service.
"""

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_MOST_VARINT_BYTES = 10


class Malformed(ValueError):
    """These bytes are no message."""


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each, in the order in which they stand; numbers of fixed length as bytes. Raises
    Malformed."""
    for number, value in _places(message):
        yield number, message[value] if isinstance(value, slice) else value


def last_of(message: bytes, number: int) -> bytes:
    """The one that counts of the fields of this number, if it is bytes; empty if there is none. Nothing else
    of the message is copied. Raises Malformed."""
    found = [value for at, value in _places(message) if at == number and isinstance(value, slice)]
    return message[found[-1]] if found else b""


def _places(message: bytes) -> Iterator[tuple[int, int | slice]]:
    """Of what is bytes, where it stands."""
    at, end = 0, len(message)
    while at < end:
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            length, at = _varint(message, at)
        elif kind in _FIXED:
            length = _FIXED[kind]
        else:
            raise Malformed(f"field {number} is of the unknown kind {kind}")
        if at + length > end:
            raise Malformed(f"field {number} is longer than what holds it")
        yield number, slice(at, at + length)
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The number that begins there, and where it ends."""
    value = 0
    for index, byte in enumerate(message[at : at + _MOST_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise Malformed("a number does not end")


def field(number: int, value: int | bytes | str) -> bytes:
    """One field. Numbers are unsigned."""
    if isinstance(value, int):
        return _as_varint(number << 3 | _VARINT) + _as_varint(value)
    content = value.encode() if isinstance(value, str) else value
    return _as_varint(number << 3 | _BYTES) + _as_varint(len(content)) + content


def _as_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class Message:
    """Of which whatever is not there has the value that protobuf gives it: nothing, 0, empty."""

    def __init__(self, data: bytes) -> None:
        """Raises Malformed."""
        self._values: dict[int, list[int | bytes]] = {}
        for number, value in fields(data):
            self._values.setdefault(number, []).append(value)

    def number(self, field_number: int) -> int:
        return next((one for one in reversed(self._all(field_number)) if isinstance(one, int)), 0)

    def numbers(self, field_number: int) -> list[int]:
        """Signed, of a list that stands packed or one by one."""
        found: list[int] = []
        for value in self._all(field_number):
            found += [value] if isinstance(value, int) else _packed(value)
        return [one - 2**64 if one >= 2**63 else one for one in found]

    def text(self, field_number: int) -> str:
        return next(reversed(self.texts(field_number)), "")

    def texts(self, field_number: int) -> list[str]:
        return [one.decode("utf-8", "replace") for one in self._all(field_number) if isinstance(one, bytes)]

    def message(self, field_number: int) -> "Message":
        """Raises Malformed."""
        return next(reversed(self.messages(field_number)), Message(b""))

    def messages(self, field_number: int) -> "list[Message]":
        """Raises Malformed."""
        return [Message(one) for one in self._all(field_number) if isinstance(one, bytes)]

    def _all(self, field_number: int) -> list[int | bytes]:
        return self._values.get(field_number, [])


def _packed(values: bytes) -> list[int]:
    found, at = [], 0
    while at < len(values):
        value, at = _varint(values, at)
        found.append(value)
    return found
