"""Kinds of device: how strong each is, what a process costs there, and which device is of which kind."""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from gpubroker_server.core.domain.units import Mib


class Kind(NamedTuple):
    name: str
    power: int
    """Its rank: more is stronger. Devices of no kind that is known have 0."""
    context_mb: Mib = Mib(0)
    """What a process takes of such a device beyond what it asked for: its CUDA context."""


SHIPPED = (
    Kind("H200", 2500),
    Kind("H100", 2000),
    Kind("A100", 624),
    Kind("5090", 419),
    Kind("L40", 362),
    Kind("4090", 330),
)

_WORDS = re.compile(r"[a-z0-9]+")


@lru_cache(4096)
def is_of_kind(reported: str, name: str) -> bool:
    """Whether the words of a kind's name follow each other in what the driver calls a device, in any case.

    `H100` is in `NVIDIA H100 80GB HBM3`; `L40` is not in `NVIDIA L40S`.
    """
    words, wanted = _WORDS.findall(reported.lower()), _WORDS.findall(name.lower())
    starts = range(len(words) - len(wanted) + 1)
    return any(words[at : at + len(wanted)] == wanted for at in starts)


def kind_of(reported: str, kinds: Iterable[Kind]) -> Kind | None:
    """The kind whose name says most of a device; of equally long ones, the first by name."""
    found = [kind for kind in kinds if is_of_kind(reported, kind.name)]
    return min(found, key=lambda kind: (-len(kind.name), kind.name), default=None)
