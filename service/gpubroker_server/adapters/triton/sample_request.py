"""A request that any model takes, made of what the server says of its inputs: zeros, one for each value."""

import math
from typing import Final

from gpubroker_server.ports.protowire import Message, field

_BYTES_OF: Final = {
    "BOOL": 1, "UINT8": 1, "INT8": 1, "UINT16": 2, "INT16": 2, "FP16": 2, "BF16": 2, "UINT32": 4, "INT32": 4,
    "FP32": 4, "UINT64": 8, "INT64": 8, "FP64": 8, "BYTES": 4,
}  # fmt: skip
"""Of one value; BYTES has the length of an empty one."""

_NOT_HEALTHY: Final = "is not healthy"
"""So the server ends what it says of a model's process that is gone."""


def sample_request(model: str, metadata: Message) -> bytes:
    """`metadata`: a ModelMetadataResponse. A dimension that may have any length has one value."""
    parts, contents = [field(1, model)], []
    for tensor in metadata.messages(4):
        datatype = tensor.text(2)
        shape = [max(1, length) for length in tensor.numbers(3)]
        given = field(1, tensor.text(1)) + field(2, datatype) + b"".join(field(3, length) for length in shape)
        parts.append(field(5, given))
        contents.append(field(7, bytes(_BYTES_OF.get(datatype, 1) * math.prod(shape))))
    return b"".join((*parts, *contents))


def verdict_on(answer: bytes | None) -> bool:
    """`answer`: a ModelStreamInferResponse, the first one. No answer, and a model's own mistake, are answers
    of a model that is there."""
    return answer is None or _NOT_HEALTHY not in Message(answer).text(1)
