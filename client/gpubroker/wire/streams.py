"""Work streams: their weights, the signals about them, and draws."""

from typing import Annotated

from msgspec import Meta

from gpubroker.wire.answered import Answered, Time


class Factors(Answered, frozen=True):
    """The factors whose product is the weight of a work stream."""

    curriculum: Annotated[float, Meta(description="The weight that an operator has given it.")]
    velocity: Annotated[float, Meta(description="The factor is above 1 while its progress rises.")]
    staleness: Annotated[float, Meta(description="The factor rises with the age of its data.")]
    quality: float

    @property
    def weight(self) -> float:
        """The product of the factors."""
        return self.curriculum * self.velocity * self.staleness * self.quality


class WorkStream(Answered, frozen=True):
    """A work stream and its present weight."""

    name: str
    progress: Annotated[
        float | None, Meta(description="The progress as last reported; null if none was reported.")
    ]
    progress_at: Time | None
    velocity_per_hour: Annotated[float, Meta(description="The velocity of the progress.")]
    data_age_seconds: Annotated[
        float | None, Meta(description="The age of its newest data, which has grown since the report.")
    ]
    quality: Annotated[float, Meta(description="The quality, 0 to 1; 1 if none was reported.")]
    factors: Factors
    weight: Annotated[float, Meta(description="The product of the factors.")]
    probability: Annotated[float, Meta(description="The probability that it is drawn; 0 while it is paused.")]
    paused: bool


class DrawnStream(Answered, frozen=True):
    stream: WorkStream
    seed: Annotated[int, Meta(description="The same seed draws the same stream while weights are equal.")]
