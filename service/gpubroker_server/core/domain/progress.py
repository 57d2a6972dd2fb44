"""The progress of a run, as the run reports it."""

from msgspec import Struct

from gpubroker_server.core.domain.units import Instant


class Progress(Struct, frozen=True):
    """The last progress that a run reported. It is kept in memory and never becomes a row."""

    at: Instant
    fraction: float | None
    message: str
    first_at: Instant | None = None
    """The time of the first reported fraction. A later fraction that is lower than `first_fraction` sets both
    anew. The first fraction of a run that resumes is not 0."""
    first_fraction: float = 0.0

    def followed_by(self, at: Instant, fraction: float | None, message: str) -> "Progress":
        if fraction is None or (self.first_at is not None and fraction >= self.first_fraction):
            return Progress(at, fraction, message, self.first_at, self.first_fraction)
        return first_progress(at, fraction, message)

    @property
    def rate_per_second(self) -> float | None:
        """The average progress per second, as a fraction of the whole; None until a higher fraction follows
        the first."""
        if self.fraction is None or self.first_at is None or self.at <= self.first_at:
            return None
        return (self.fraction - self.first_fraction) / (self.at - self.first_at) or None

    @property
    def eta_at(self) -> Instant | None:
        """The time at which the fraction reaches 1 at this rate; None if that is not within
        FORESEEN_SECONDS."""
        rate = self.rate_per_second
        if self.fraction is None or rate is None or 1.0 - self.fraction > rate * FORESEEN_SECONDS:
            return None
        return Instant(self.at + (1.0 - self.fraction) / rate)


FORESEEN_SECONDS = 10 * 365 * 86_400.0


def first_progress(at: Instant, fraction: float | None, message: str) -> Progress:
    first_at = None if fraction is None else at
    return Progress(at, fraction, message, first_at, fraction or 0.0)
