"""For how long what is over stays readable."""

from dataclasses import dataclass

from gpubroker_server.core.domain.units import Instant, Position, Seconds


@dataclass(frozen=True, slots=True)
class Cutoffs:
    """What ended, was submitted with a key or was noted before these instants may go."""

    finished: Instant
    keyed: Instant
    audited: Instant
    heard: Position
    """Events after it stay, whatever their age: who takes them out has yet to hear them. A clock that is set
    far ahead makes all of them old at once."""


@dataclass(frozen=True, slots=True)
class Retention:
    finished_seconds: Seconds
    """From a task's end on, with all that belongs to it; and for events, from when they happened."""
    idempotency_seconds: Seconds
    """A task that was submitted with a key stays at least so long, from its submit on."""
    audit_seconds: Seconds

    def cutoffs(self, now: Instant, heard: Position) -> Cutoffs:
        return Cutoffs(
            finished=Instant(now - self.finished_seconds),
            keyed=Instant(now - self.idempotency_seconds),
            audited=Instant(now - self.audit_seconds),
            heard=heard,
        )
