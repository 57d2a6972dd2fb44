"""Find the GPUs of a machine that a list in the form of CUDA_VISIBLE_DEVICES names, as CUDA reads it."""

from collections.abc import Sequence
from typing import Final, NamedTuple

VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
_BY_UUID: Final = ("GPU-", "MIG-")


class GpuNames(NamedTuple):
    """A GPU of the machine, and the UUIDs of its instances (MIG)."""

    uuid: str
    """The UUID of the GPU; empty if the GPU does not answer."""
    instances: Sequence[str] = ()


class VisibleGpu(NamedTuple):
    number: int
    only: tuple[str, ...] | None = None
    """UUIDs, or their beginnings, of the visible instances; None if the whole GPU is visible."""


class NamedTwice(ValueError):
    """Raised if a list names a GPU twice, because CUDA then shows no GPU to the process."""


def visible_gpus(words: str, gpus: Sequence[GpuNames]) -> list[VisibleGpu]:
    """Return the GPUs that the list names, in its order.

    An entry is an index, a UUID, or the beginning of a UUID that only one GPU or instance has. The list ends
    at the first entry that is none of these. A UUID that is not found may belong to a GPU that does not
    answer. The first such GPU is then among the visible GPUs, with the UUID in `only`.

    Raises NamedTwice if an entry is repeated.
    """
    visible: list[VisibleGpu] = []
    seen: set[tuple[int, str]] = set()
    for word in (part.strip() for part in words.split(",")):
        gpu_and_instance = _find(word, gpus)
        if gpu_and_instance is None:
            break
        index, instance = gpu_and_instance
        if (
            (index, instance) in seen
            or (index, "") in seen
            or (not instance and any(i == index for i, _ in seen))
        ):
            raise NamedTwice(f"{words!r} names GPU {index} twice, and CUDA shows none then; name each once")
        seen.add(gpu_and_instance)
        visible.append(VisibleGpu(index, (instance,) if instance else None))
    return _merged(visible)


def _find(word: str, gpus: Sequence[GpuNames]) -> tuple[int, str] | None:
    """Return (index of the GPU, UUID of the instance or empty); None if the entry is invalid."""
    if word.isascii() and word.isdigit():
        return (int(word), "") if int(word) < len(gpus) else None
    if not word.startswith(_BY_UUID) or word in _BY_UUID:
        return None
    whole = [(index, "") for index, gpu in enumerate(gpus) if gpu.uuid.startswith(word)]
    parts = [
        (index, name) for index, gpu in enumerate(gpus) for name in gpu.instances if name.startswith(word)
    ]
    exact = [(index, name) for index, name in whole + parts if word == (name or gpus[index].uuid)]
    matching = exact or whole + parts
    if len(matching) == 1:
        return matching[0]
    silent = [index for index, gpu in enumerate(gpus) if not gpu.uuid]
    return (silent[0], word) if silent and not matching else None


def _merged(visible: Sequence[VisibleGpu]) -> list[VisibleGpu]:
    """Join the instances of each GPU. A GPU keeps its first place in the list."""
    by_number: dict[int, VisibleGpu] = {}
    for gpu in visible:
        earlier = by_number.get(gpu.number)
        more = (*(earlier.only or ()), *(gpu.only or ())) if earlier else gpu.only
        by_number[gpu.number] = VisibleGpu(gpu.number, more)
    return list(by_number.values())
