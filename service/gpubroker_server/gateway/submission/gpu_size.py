"""A GPU's share as clients write it: a number of MiB, or the word for what earlier runs used."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, GetPydanticSchema, ValidatorFunctionWrapHandler, WithJsonSchema
from pydantic_core import core_schema

LEARNED: Final = "learned"
GpuSize = int | Literal["learned"]
MOST_MB: Final = 16_777_216


def _size_or_learned(value: Any, read_size: ValidatorFunctionWrapHandler) -> Any:
    return value if value == LEARNED else read_size(value)


GpuMb = Annotated[
    GpuSize,
    GetPydanticSchema(
        lambda _, handler: core_schema.no_info_wrap_validator_function(
            _size_or_learned, handler(Annotated[int, Field(ge=1, le=MOST_MB)])
        )
    ),
    WithJsonSchema(
        {
            "description": "MiB of each device. `learned`: what earlier runs of the same model type (else "
            "name, else entrypoint) used, and a margin; whole devices until enough of them were measured.",
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": MOST_MB},
                {"type": "string", "const": LEARNED},
            ],
        }
    ),
]
"""Not a plain union: that would answer a wrong number with two faults, one of which is about a word."""
