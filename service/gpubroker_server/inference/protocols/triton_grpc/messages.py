"""Read messages over gRPC: the model, the settings and the files in requests, and the answers that are
merged.

A message that may hold tensors is not parsed: its fields are scanned, and only the names are copied.
"""

from collections.abc import Sequence
from typing import Any, Final

from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from gpubroker_server.inference.operation import FanOut, Target
from gpubroker_server.inference.protocols.triton.fan_out import merged_index, summed_statistics
from gpubroker_server.inference.protocols.triton.operations import TritonOperation
from gpubroker_server.ports.triton_messages import messages

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED: Final = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES: Final = 10

_MODEL_NAME: Final = 1
_MODEL_VERSION: Final = 2
_PARAMETERS: Final = 3
_KEY: Final = 1
_ERROR_MESSAGE: Final = 1
_LIVE: Final = 1


def target_of(operation: TritonOperation, message: bytes) -> Target:
    """Return the operation with the model and the version that the message names."""
    if not operation.model_field:
        return Target(operation)
    has_version = operation.model_field == _MODEL_NAME
    version = last_bytes(message, _MODEL_VERSION) if has_version else b""
    return Target(operation, last_bytes(message, operation.model_field), version)


def error_in(answer: bytes) -> str:
    """Return the error in an answer of a stream (ModelStreamInferResponse); empty if it has none."""
    return last_bytes(answer, _ERROR_MESSAGE).decode(errors="replace")


def last_bytes(message: bytes, number: int) -> bytes:
    """Return the value of the last field with this number that holds bytes; protobuf's parsers take the last
    one, too. Returns empty bytes if there is none, or if `message` is no message, which the server will
    refuse."""
    span = (0, 0)
    offset, end = 0, len(message)
    try:
        while offset < end:
            # A key is the field's number, and its wire type in the lowest three bits.
            key, offset = _varint(message, offset)
            kind = key & 7
            if kind == _VARINT:
                _, offset = _varint(message, offset)
                continue
            length, offset = _varint(message, offset) if kind == _BYTES else (_FIXED[kind], offset)
            if offset + length > end:
                return b""
            if kind == _BYTES and key >> 3 == number:
                span = offset, offset + length
            offset += length
    except (KeyError, IndexError):
        return b""
    return message[slice(*span)]


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    """Return the number that begins at `offset`, and the offset of its end. Raises IndexError if it does not
    end."""
    value = shift = 0
    while shift < 7 * _MAX_VARINT_BYTES:
        byte = message[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
        shift += 7
    raise IndexError


def changes_settings(message: bytes) -> bool:
    """Return True if a TraceSettingRequest or LogSettingsRequest changes a setting. Bytes that are no message
    count as a change."""
    try:
        return bool(messages.SettingsRequest.FromString(message).settings)
    except DecodeError:
        return True


def brings_files(message: bytes) -> bool:
    """Return True if a RepositoryModelLoadRequest may bring files. If a parameter has several keys, each is
    checked. Bytes that are no message, and parameters of another type, may bring files."""
    try:
        load = messages.LoadParameters.FromString(message)
    except DecodeError:
        return True
    if any(unknown.field_number == _PARAMETERS for unknown in UnknownFieldSet(load)):
        return True
    return any(
        any(key.startswith("file:") for key in parameter.key)
        or any(unknown.field_number == _KEY for unknown in UnknownFieldSet(parameter))
        for parameter in load.parameters
    )


def merged_replies(how: FanOut, replies: Sequence[bytes]) -> bytes:
    if how is FanOut.ANY:
        live = (reply for reply in replies if messages.Health.FromString(reply).status == _LIVE)
        return next(live, replies[0])
    if how is FanOut.EACH or len(replies) < 2:
        return replies[0]
    if how is FanOut.INDEX:
        indexes = [_as_dict(messages.RepositoryIndexResponse.FromString(reply)) for reply in replies]
        merged = {"models": merged_index(index.get("models", ()) for index in indexes)}
        response = ParseDict(merged, messages.RepositoryIndexResponse())
    else:
        statistics = [_as_dict(messages.ModelStatisticsResponse.FromString(reply)) for reply in replies]
        merged = {"model_stats": summed_statistics(each.get("model_stats", ()) for each in statistics)}
        response = ParseDict(merged, messages.ModelStatisticsResponse())
    encoded: bytes = response.SerializeToString()
    return encoded


def _as_dict(message: Any) -> dict[str, Any]:
    """Return the fields that are set. Numbers stay numbers, whereas protobuf's own JSON writes some as
    text."""
    values: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.message_type is None:
            values[field.name] = value
        elif field.message_type.GetOptions().map_entry:
            values[field.name] = {key: _as_dict(entry) for key, entry in value.items()}
        elif hasattr(value, "ListFields"):
            values[field.name] = _as_dict(value)
        else:
            values[field.name] = [_as_dict(entry) for entry in value]
    return values
