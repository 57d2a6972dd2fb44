"""Work streams: their weights, what is told of them, and draws."""

from typing import Annotated

from msgspec import Meta

from gpubroker.wire.answered import Answered, Time


class Factors(Answered, frozen=True):
    """The factors whose product is the weight of a work stream."""

    curriculum: Annotated[float, Meta(description="The weight that an operator has given it.")]
    velocity: Annotated[float, Meta(description="Above 1 while its progress rises.")]
    staleness: Annotated[float, Meta(description="Rises with the age of its data.")]
    quality: float

    @property
    def weight(self) -> float:
        """The product of the factors."""
        return self.curriculum * self.velocity * self.staleness * self.quality


class WorkStream(Answered, frozen=True):
    """A work stream, and what it counts now."""

    name: str
    progress: Annotated[float | None, Meta(description="As last told; null: nothing was told.")]
    progress_at: Time | None
    velocity_per_hour: Annotated[float, Meta(description="Of the progress.")]
    data_age_seconds: Annotated[float | None, Meta(description="Of its newest data, as they age since.")]
    quality: Annotated[float, Meta(description="0 to 1; 1 if nothing was told.")]
    factors: Factors
    weight: Annotated[float, Meta(description="The product of the factors.")]
    probability: Annotated[float, Meta(description="That it is drawn; 0 while it is paused.")]
    paused: bool


class DrawnStream(Answered, frozen=True):
    stream: WorkStream
    seed: Annotated[int, Meta(description="The same seed draws the same stream while weights are equal.")]
