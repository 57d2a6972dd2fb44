"""How much one turn of a planner may look at."""


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
