"""Bytes that are uploaded once, and named by any number of inferences."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from gpubroker.errors import WrongArgument
from gpubroker.models.tensors import described
from gpubroker.transport.decoding import Raw

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An array that was uploaded is an input of `infer_later` as it is. Of bytes the input says what they
    are: `{"datatype": "UINT8", "shape": [2, 3], "object": stored.id}`."""

    id: str
    size_bytes: int = 0
    created_at: datetime | None = None
    expires_at: datetime | None = None
    """Each use puts it off."""
    datatype: str = ""
    """Of the array, in Triton's words; empty for bytes."""
    shape: tuple[int, ...] = ()
    raw: Raw = field(default_factory=dict, repr=False)

    def as_input(self, name: str) -> dict[str, Any]:
        """Raises WrongArgument for bytes."""
        if not self.datatype:
            raise WrongArgument(
                f"input {name} is an object that was uploaded as bytes; say what they are: "
                f'{{"datatype": ..., "shape": [...], "object": "{self.id}"}}'
            )
        return {"datatype": self.datatype, "shape": list(self.shape), "object": self.id}


AnyObject = StoredObject | str
"""An object, or its id."""


@dataclass(frozen=True, slots=True)
class ObjectUsage:
    """Bytes, of all objects of the tenant."""

    counted_bytes: int = 0
    """Each object counts 4 KiB at least."""
    most_bytes: int = 0
    raw: Raw = field(default_factory=dict, repr=False)


def object_body(data: "bytes | bytearray | memoryview | ArrayLike") -> tuple[bytes, dict[str, Any]]:
    """The bytes, and what is known of them. Raises WrongArgument."""
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data), {}
    about, packed = described("of the object", data)
    return packed, {"datatype": about["datatype"], "shape": tuple(about["shape"])}
