"""The values of a tensor, for comparison."""

from typing import Any

from gpubroker_server.core.serving.tensors import Tensor, values_in_steps


def values_of(tensor: Tensor) -> list[Any]:
    """Flat. Raises BadTensor."""
    return [value for some in values_in_steps(tensor) for value in some]
