"""A body of many tasks, taken apart without being read: each piece is read by itself, in its turn."""

from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic_core import from_json

from gpubroker_server.gateway.http.problems import Problem

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_pieces = msgspec.json.Decoder(list[msgspec.Raw])


def members_of(text: bytes) -> Mapping[str, bytes] | None:
    """The members of an object, each as the JSON text that it is; None if it is something else.

    Raises Problem malformed-json.
    """
    try:
        return {name: bytes(member) for name, member in _members.decode(text).items()}
    except msgspec.ValidationError:
        return None
    except msgspec.DecodeError as error:
        raise malformed(str(error)) from None


def value_of(text: bytes) -> Any:
    """Raises Problem malformed-json."""
    try:
        return from_json(text)
    except ValueError as error:
        raise malformed(str(error)) from None


def pieces_of(text: bytes) -> list[bytes] | None:
    """The same of an array."""
    try:
        return [bytes(piece) for piece in _pieces.decode(text)]
    except msgspec.ValidationError:
        return None


def malformed(why: str) -> Problem:
    return Problem("malformed-json", f"the body is not JSON: {why}; send one JSON object in UTF-8")
