"""Forecasts of times and sizes, from earlier runs and from the times that tasks state."""

from typing import Annotated

from msgspec import Meta, Struct

from gpubroker.wire.answered import Answered, Time


class Expected(Answered, frozen=True):
    """The time at which something is likely to happen. All forecasts of the API have this form."""

    p50_at: Time
    p90_at: Time
    p50_seconds: Annotated[
        float, Meta(description="Seconds from now until it happens, in half of all cases or sooner.")
    ]
    p90_seconds: Annotated[
        float, Meta(description="Seconds from now until it happens, in nine of ten cases or sooner.")
    ]
    n: Annotated[int, Meta(description="The number of runs that the forecast was learned from; 0 if none.")]
    basis: Annotated[
        str,
        Meta(
            description="The basis of the forecast: `stated` run times, limits and grace periods; `learned` "
            "run times; or a `guess` at runs of unknown length."
        ),
    ]


class ForecastsKept(Answered, frozen=True):
    """The accuracy of the forecasts of starts that had the same basis. The first forecast of each task
    counts."""

    basis: Annotated[str, Meta(description="The basis of these forecasts: `stated`, `learned` or `guess`.")]
    n: Annotated[
        int,
        Meta(description="The number of starts that had a forecast, at most 1000; recent ones count more."),
    ]
    median_error_seconds: Annotated[
        float, Meta(description="The median time between the forecast and the real start, early or late.")
    ]
    within_p90: Annotated[
        float, Meta(description="The share of tasks that had started by their `p90_at`; the aim is 0.9.")
    ]


class Quantiles(Answered, frozen=True):
    """The values that 50, 90 and 95 % of `n` runs did not exceed, each within 2 % of the true value."""

    n: Annotated[int, Meta(description="The number of runs, at most 1000; recent ones count more.")]
    p50: float
    p90: float
    p95: float


class Estimate(Answered, frozen=True):
    """The memory and the time that the runs of one subject took on one kind of device."""

    subject: Annotated[
        str,
        Meta(
            description="The model type of the runs; without one, their name; without both, their entrypoint."
        ),
    ]
    kind: Annotated[str, Meta(description="The kind of device; empty for runs without a device.")]
    gpu_mb: Annotated[
        Quantiles | None, Meta(description="The most memory that a run used of one device, in MiB.")
    ]
    seconds: Annotated[Quantiles | None, Meta(description="The run time of runs that did all of their work.")]
    needed_runs: Annotated[
        int, Meta(description="The number of runs that must be measured before a size is learned.")
    ]


class Sizing(Struct, frozen=True):
    """The size that was learned from earlier runs when a task or a gang was submitted.

    If the ranks may use different devices, these are the values of the rank with the largest size, and
    `message` has the sizes of all ranks.
    """

    gpu_mb: Annotated[int | None, Meta(description="The size per device; null for whole devices.")]
    p95_mb: Annotated[int | None, Meta(description="The memory that 95 of 100 runs did not exceed.")]
    n: Annotated[int, Meta(description="The number of runs, or ranks, that had been measured at submit.")]
    kind: Annotated[str | None, Meta(description="The kind of device that these runs used.")]
    message: str
