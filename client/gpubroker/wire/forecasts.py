"""Forecasts from earlier runs and stated times."""

from typing import Annotated

from msgspec import Meta, Struct

from gpubroker.wire.answered import Answered, Time


class Expected(Answered, frozen=True):
    """The time at which something is likely to happen; the same for every forecast of the API."""

    p50_at: Time
    p90_at: Time
    p50_seconds: Annotated[float, Meta(description="The seconds from now that one in two does not exceed.")]
    p90_seconds: Annotated[float, Meta(description="The seconds from now that nine in ten do not exceed.")]
    n: Annotated[int, Meta(description="The number of runs behind it; 0 for none.")]
    basis: Annotated[
        str,
        Meta(
            description="The basis of the forecast: `stated` run times, limits and grace periods; `learned` "
            "run times; or a `guess` at runs of unknown length."
        ),
    ]


class ForecastsKept(Answered, frozen=True):
    """The accuracy of the first forecasts of starts, by what they rested on."""

    basis: Annotated[str, Meta(description="One of stated, learned and guess.")]
    n: Annotated[
        int, Meta(description="The number of starts with a forecast, at most 1000; recent ones count more.")
    ]
    median_error_seconds: Annotated[
        float, Meta(description="The distance from the forecast start, either way.")
    ]
    within_p90: Annotated[float, Meta(description="The share that started by the p90; 0.9 is right.")]


class Quantiles(Answered, frozen=True):
    """The values that 50, 90 and 95 % of `n` runs did not exceed, each within 2 % of the true one."""

    n: Annotated[int, Meta(description="The number of runs, at most 1000; recent ones count more.")]
    p50: float
    p90: float
    p95: float


class Estimate(Answered, frozen=True):
    """The memory and the time that the runs of one subject took on one kind of device."""

    subject: Annotated[str, Meta(description="A model type, else a name, else an entrypoint.")]
    kind: Annotated[str, Meta(description="The kind of device; empty for runs without one.")]
    gpu_mb: Annotated[Quantiles | None, Meta(description="The most used of one device, in MiB.")]
    seconds: Annotated[Quantiles | None, Meta(description="The time that runs took that did all the work.")]
    needed_runs: Annotated[
        int, Meta(description="The number of runs that must be measured before a size is learned.")
    ]


class Sizing(Struct, frozen=True):
    """The size of a task, or of the ranks of a gang, as it was learned from earlier runs at submit.

    If the ranks may use different devices, it is the largest size, and the message has each.
    """

    gpu_mb: Annotated[int | None, Meta(description="The size per device; null for whole devices.")]
    p95_mb: Annotated[int | None, Meta(description="The memory that 95 of 100 runs did not exceed.")]
    n: Annotated[int, Meta(description="The number of runs, or ranks, that had been measured.")]
    kind: Annotated[str | None, Meta(description="The kind of their devices.")]
    message: str
