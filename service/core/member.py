"""The ranks of a gang: where each of them is, and how far it has come."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from service.core.units import NodeName


class MemberState(StrEnum):
    PLACED = "placed"
    """Its order is on its way, or its process is getting ready."""
    READY = "ready"
    """It waits for the others; once its task is RUNNING it has been told to begin."""
    SUCCEEDED = "succeeded"
    ENDED = "ended"
    """It failed, gave way, was lost, or never started."""


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a claim. A rank whose process is gone, or given up, takes nothing of its node any more."""

    rank: int
    node: NodeName
    state: MemberState = MemberState.PLACED
    gone: bool = False
    address: str = ""
    """`ip:port`, as it offered when it was ready."""

    @property
    def has_ended(self) -> bool:
        return self.state in (MemberState.SUCCEEDED, MemberState.ENDED)


def members_fields(members: Iterable[Member]) -> list[list[Any]]:
    return [[m.rank, m.node, m.state.value, m.gone, m.address] for m in members]


def members_from(rows: Iterable[Sequence[Any]]) -> tuple[Member, ...]:
    return tuple(
        Member(rank, NodeName(node), MemberState(state), gone, address)
        for rank, node, state, gone, address in rows
    )
