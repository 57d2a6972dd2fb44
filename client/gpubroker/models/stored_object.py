"""Uploaded objects, as inputs of inferences."""

from typing import Any

from gpubroker.errors import WrongArgument
from gpubroker.wire.objects import StoredObject as Answer


class StoredObject(Answer, frozen=True):
    """An uploaded object. An array can be used as an input of `infer_later` directly; for bytes the input
    states their form: `{"datatype": "UINT8", "shape": [2, 3], "object": stored.id}`."""

    datatype: str = ""
    """The datatype of an array, in Triton's words; empty for bytes."""
    shape: tuple[int, ...] = ()

    def as_input(self, name: str) -> dict[str, Any]:
        """Return the object as an input of an inference. Raises WrongArgument for bytes."""
        if not self.datatype:
            raise WrongArgument(
                f"input {name} is an object that was uploaded as bytes; describe it: "
                f'{{"datatype": ..., "shape": [...], "object": "{self.id}"}}'
            )
        return {"datatype": self.datatype, "shape": list(self.shape), "object": self.id}
