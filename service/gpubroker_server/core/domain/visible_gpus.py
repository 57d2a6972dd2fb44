"""Finds the GPUs of a machine that a list in the form of CUDA_VISIBLE_DEVICES names, as CUDA reads it."""

from collections.abc import Sequence
from typing import Final, NamedTuple

VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
_BY_UUID: Final = ("GPU-", "MIG-")


class GpuNames(NamedTuple):
    """A GPU of the machine, and the UUIDs of its instances (MIG)."""

    uuid: str
    """Empty if the GPU does not answer."""
    instances: Sequence[str] = ()


class VisibleGpu(NamedTuple):
    number: int
    only: tuple[str, ...] | None = None
    """UUIDs, or their beginnings: these instances are meant, and not the whole GPU; None: all of it."""


class NamedTwice(ValueError):
    """CUDA shows no GPU to a process whose list names one twice."""


def visible_gpus(words: str, gpus: Sequence[GpuNames]) -> list[VisibleGpu]:
    """Return the GPUs that the list names, in its order.

    An entry is an index, a UUID or the beginning of one that only one GPU or instance has. The list ends at
    the first entry that is none of these. A GPU that does not answer may be one that is named by UUID: it is
    among the GPUs then, and shows what of it is named once it answers.

    Raises NamedTwice if an entry is repeated.
    """
    found: list[VisibleGpu] = []
    seen: set[tuple[int, str]] = set()
    for word in (part.strip() for part in words.split(",")):
        one = _find(word, gpus)
        if one is None:
            break
        index, instance = one
        if (
            (index, instance) in seen
            or (index, "") in seen
            or (not instance and any(i == index for i, _ in seen))
        ):
            raise NamedTwice(f"{words!r} names GPU {index} twice, and CUDA shows none then; name each once")
        seen.add(one)
        found.append(VisibleGpu(index, (instance,) if instance else None))
    return _merged(found)


def _find(word: str, gpus: Sequence[GpuNames]) -> tuple[int, str] | None:
    """Return (index, UUID of the instance or empty); None if the entry is invalid."""
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


def _merged(found: Sequence[VisibleGpu]) -> list[VisibleGpu]:
    """Join the instances of each GPU; it stays at its first place."""
    by_number: dict[int, VisibleGpu] = {}
    for one in found:
        known = by_number.get(one.number)
        more = (*(known.only or ()), *(one.only or ())) if known else one.only
        by_number[one.number] = VisibleGpu(one.number, more)
    return list(by_number.values())
