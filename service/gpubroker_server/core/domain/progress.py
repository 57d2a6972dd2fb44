"""The progress of a run, as the run reports it."""

from msgspec import Struct

from gpubroker_server.core.domain.units import Instant


class Progress(Struct, frozen=True):
    """The last progress that a run reported; never a row."""

    at: Instant
    fraction: float | None
    message: str
    first_at: Instant | None = None
    """The time at which this run first reported a fraction; set anew when a later fraction is lower than
    that. A run that resumes does not begin at 0."""
    first_fraction: float = 0.0

    def followed_by(self, at: Instant, fraction: float | None, message: str) -> "Progress":
        if fraction is None or (self.first_at is not None and fraction >= self.first_fraction):
            return Progress(at, fraction, message, self.first_at, self.first_fraction)
        return first_progress(at, fraction, message)

    @property
    def rate_per_second(self) -> float | None:
        """The share done in a second, on average; None before a second, higher fraction."""
        if self.fraction is None or self.first_at is None or self.at <= self.first_at:
            return None
        return (self.fraction - self.first_fraction) / (self.at - self.first_at) or None

    @property
    def eta_at(self) -> Instant | None:
        """Return when the fraction reaches 1 at this rate; None if that is not within FORESEEN_SECONDS."""
        rate = self.rate_per_second
        if self.fraction is None or rate is None or 1.0 - self.fraction > rate * FORESEEN_SECONDS:
            return None
        return Instant(self.at + (1.0 - self.fraction) / rate)


FORESEEN_SECONDS = 10 * 365 * 86_400.0


def first_progress(at: Instant, fraction: float | None, message: str) -> Progress:
    known = None if fraction is None else at
    return Progress(at, fraction, message, known, fraction or 0.0)
