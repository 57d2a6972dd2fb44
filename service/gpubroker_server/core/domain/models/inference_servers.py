"""Which servers answer queued inferences, and how many of one model at once."""

from dataclasses import dataclass

KIND = "inference"
"""What stands where others have the kind of their run."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The servers by name, in the order in which they are configured."""

    ledger: tuple[str, ...] = ()
    """Their models are loaded and unloaded by the leader: who asks for one waits until it is there."""
    others: tuple[str, ...] = ()
    """They have what they have, and say so themselves."""
    at_once: int = 64
    """So many inferences of one model are with its server, or about to be."""

    @property
    def is_anywhere(self) -> bool:
        return bool(self.ledger or self.others)


NOBODY = Serving()
