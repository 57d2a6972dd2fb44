"""The ranks of a gang: where each of them is, and how far it has come."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gpubroker_server.core.domain.units import Instant, NodeName, TaskId


class MemberState(StrEnum):
    PLACED = "placed"
    """Its order is on its way, or its process is getting ready."""
    READY = "ready"
    """It waits for the others; once its task is RUNNING it has been told to begin."""
    SUCCEEDED = "succeeded"
    ENDED = "ended"
    """It failed, gave way, was lost, or never started."""
    LEAVING = "leaving"
    """It was asked to give its memory back, and the others go on without it. Its end is not theirs."""
    LEFT = "left"
    """It has ended after that."""


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a claim. A rank whose process is gone, or given up, takes nothing of its node any more."""

    rank: int
    node: NodeName
    state: MemberState = MemberState.PLACED
    gone: bool = False
    address: str = ""
    """`ip:port`, as it offered when it was ready."""
    freeing_for: TaskId | None = None
    """The preemptor whose pledge its memory goes to once it was asked to leave."""
    stop_deadline_at: Instant | None = None
    """Until then it may take its time to leave."""

    @property
    def has_ended(self) -> bool:
        return self.state in (MemberState.SUCCEEDED, MemberState.ENDED, MemberState.LEFT)

    @property
    def takes_part(self) -> bool:
        """It is one of those that the gang goes on with."""
        return self.state not in (MemberState.LEAVING, MemberState.LEFT)


def members_fields(members: Iterable[Member]) -> list[list[Any]]:
    """Only of those that were asked to leave there is more than five values."""
    return [
        [m.rank, m.node, m.state.value, m.gone, m.address]
        + ([] if m.takes_part else [m.freeing_for, m.stop_deadline_at])
        for m in members
    ]


def members_from(rows: Iterable[Sequence[Any]]) -> tuple[Member, ...]:
    return tuple(
        Member(rank, NodeName(node), MemberState(state), gone, address, *notice)
        for rank, node, state, gone, address, *notice in rows
    )
