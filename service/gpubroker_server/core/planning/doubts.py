"""What the order of a cycle asks of what is known, to leave out those who have nothing to expect."""

from collections.abc import Mapping
from typing import Protocol

from gpubroker_server.core.planning.looks import Looks
from gpubroker_server.core.world.queue import Group, Kin


class Doubts(Protocol):
    """What is known of a group before anybody looks for it."""

    looks: Looks

    def has_no_right(self, group: Group) -> bool:
        """Their tenant may neither have such tasks now nor make room for them, whatever there is."""
        ...

    def may_reclaim(self, group: Group) -> bool:
        """There may be something for its tasks and for no others."""
        ...

    def shut(self) -> Mapping[Kin, int]:
        """Demand -> the priority up to which it is known that there is nothing, whoever asks."""
        ...

    def is_refused(self, group: Group) -> bool:
        """There is nothing for its tasks."""
        ...

    def has_nothing(self, group: Group) -> bool:
        """There is nothing for its tasks, nor for their likes of lower priority."""
        ...
