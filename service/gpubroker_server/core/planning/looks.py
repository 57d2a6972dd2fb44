"""How much one turn of a planner may look at."""

from enum import Enum

A_GLANCE = 0.2
"""To see that nothing has changed for a demand costs so much of a look."""

A_NOD = 0.02
"""To see that a demand is shut."""

AN_ENTRY = 0.02
"""To compare a node with what one demand needs at least."""


class Looks:
    """Counted where they are taken: one is a glance at one node, and what takes longer counts more."""

    __slots__ = ("_allowed", "_may_pause", "taken")

    def __init__(self, allowed: float = 0.0, *, may_pause: bool = False) -> None:
        """`may_pause`: in the middle of a task too, because what was found so far will be remembered."""
        self._allowed = allowed
        self._may_pause = may_pause
        self.taken = 0.0

    def allow(self, allowed: float) -> None:
        """So much more, counted from now on."""
        self._allowed = allowed
        self.taken = 0.0

    @property
    def are_spent(self) -> bool:
        return self.taken >= self._allowed

    @property
    def call_for_a_pause(self) -> bool:
        return self._may_pause and self.are_spent


class Paused(Enum):
    """What is told instead of an answer when a turn is over: whoever asks again goes on with it."""

    HERE = "here"
