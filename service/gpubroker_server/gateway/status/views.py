"""Schema of a task in answers. Clients must accept more fields and more values than they know."""

from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.gateway.http.times import Time
from gpubroker_server.gateway.status.quarantine import QuarantinedView

Overused = Annotated[
    int | None, Field(description="What the run used when it was first found to use more than its lease.")
]


class AmountsView(TypedDict):
    gpus: int
    gpu_mb: int | None
    gpu_fraction: float | None
    exclusive: bool
    cpu: float
    memory_mb: int
    custom: dict[str, float]
    kinds: list[str]
    nodes: dict[str, list[str]]


class BundleView(AmountsView):
    """What each of `count` ranks of a gang asks for."""

    count: int


class DemandView(AmountsView):
    min_power: int
    min_device_mb: int
    prefer_kinds: list[str]
    prefer_nodes: dict[str, list[str]]
    pool: str
    bundles: Annotated[list[BundleView] | None, Field(description="Of a gang; null for other tasks.")]
    strategy: str | None
    min_ranks: int | None


class ResourcesView(DemandView):
    roles: Annotated[list[str], Field(description="The names of the roles that share the sizes.")]


class DeviceShare(TypedDict):
    """What a task holds of one device."""

    uuid: str
    gpu_mb: int
    context_mb: Annotated[int, Field(description="Of `gpu_mb`, the process's own cost beyond its demand.")]
    state: Annotated[str, Field(description="reserved, held, releasing or quarantined.")]
    overused_mb: Overused


class RankView(TypedDict):
    """One rank of a gang."""

    rank: int
    node: str
    state: Annotated[str, Field(description="placed, ready, running, leaving, left, succeeded or ended.")]
    devices: list[DeviceShare]


class RunView(TypedDict):
    kind: Annotated[str, Field(description="entrypoint, command, function, inference, model or external.")]
    entrypoint: str | None
    command: list[str] | None
    model: Annotated[str | None, Field(description="Of an inference: the model that answers it.")]


class ProgressView(TypedDict):
    fraction: float | None
    message: str
    at: Time
    rate_per_second: Annotated[
        float | None,
        Field(description="Of the fraction, on average since the run first reported one; null before that."),
    ]
    eta_at: Annotated[Time | None, Field(description="When the fraction reaches 1 at this rate.")]


class PhasesView(TypedDict):
    """How long the task has been in each phase, over all its attempts; the present one counts until now."""

    queued_seconds: Annotated[float, Field(description="In the queue; for whatever reason it waited.")]
    admitted_seconds: Annotated[
        float,
        Field(
            description="From its admission until its node's agent had the order to start it. The agent says "
            "so when it has started; until then all of the time counts here."
        ),
    ]
    starting_seconds: Annotated[
        float, Field(description="From then until its code began; of a model, all of its load.")
    ]
    running_seconds: float
    stopping_seconds: Annotated[float, Field(description="From a notice to stop until it was gone.")]


class ExpectedView(TypedDict):
    """When something is likely to happen; the same for every forecast of the API."""

    p50_at: Time
    p90_at: Time
    p50_seconds: Annotated[float, Field(description="From now; one in two takes no longer.")]
    p90_seconds: Annotated[float, Field(description="From now; nine in ten take no longer.")]
    n: Annotated[int, Field(description="The number of runs behind it; 0: none.")]
    basis: Annotated[
        str,
        Field(
            description="What it rests on: `stated` run times, limits and grace periods; `learned` run "
            "times; or a `guess` at runs of unknown length."
        ),
    ]


class ForecastsView(TypedDict):
    """How accurate the first forecasts of starts were, by what they rested on."""

    basis: Annotated[str, Field(description="stated, learned or guess.")]
    n: Annotated[int, Field(description="Starts with a forecast, at most 1000; recent ones count more.")]
    median_error_seconds: Annotated[float, Field(description="From the forecast start, either way.")]
    within_p90: Annotated[float, Field(description="The share that started by the p90; 0.9 is right.")]


class InheritsView(TypedDict):
    """A task of higher priority that waits for this one, directly or through others. This one has its place
    in the queue by that priority."""

    priority: int
    task: str


class PendingView(TypedDict):
    """Why a task waits."""

    reason: Annotated[str, Field(description="A stable token.")]
    message: str
    position: Annotated[int | None, Field(description="1 is next.")]
    inherits: Annotated[InheritsView | None, Field(description="Null if it has its own priority.")]
    start: Annotated[ExpectedView | None, Field(description="Only for the first tasks of the queue.")]


class SizingView(TypedDict):
    """How the size of a task, or of the ranks of a gang, was learned from earlier runs when it was submitted.
    Of ranks that may use different devices: the largest, and the message has each."""

    gpu_mb: Annotated[int | None, Field(description="Per device; null: whole devices.")]
    p95_mb: Annotated[int | None, Field(description="95 of 100 runs used less.")]
    n: Annotated[int, Field(description="Runs, or ranks, that had been measured.")]
    kind: Annotated[str | None, Field(description="Of their devices.")]
    message: str


class ErrorView(TypedDict):
    kind: Annotated[str, Field(description="A stable token, such as exception, out_of_memory, timeout.")]
    message: str
    traceback: str


class AfterView(TypedDict):
    task: str
    on_failure: Annotated[str, Field(description="fail or ignore.")]


class TaskUrls(TypedDict):
    self: str
    result: str
    events: str
    explain: str
    cancel: str


class ResultFields(TypedDict, total=False):
    """Either of them, once a task has ended."""

    result: Annotated[Any, Field(description="The value, if it is JSON; null if the task left none.")]
    data_base64: Annotated[str, Field(description="The bytes, if they are not JSON.")]


class TaskView(ResultFields):
    """The present state of a task. `pending` is only in answers about a single task, not in lists.

    `result` or `data_base64` are only in answers that waited for the end.
    """

    id: str
    name: str
    tenant: str
    state: str
    priority: int
    band: str
    run: RunView
    resources: ResourcesView
    sizing: Annotated[SizingView | None, Field(description="How its size was learned at submit, if it was.")]
    placement: str
    max_retries: int
    timeout_seconds: float | None
    grace_seconds: float
    expected_seconds: Annotated[float | None, Field(description="Of one run, as stated at submit.")]
    queue_ttl_seconds: float | None
    after: Annotated[list[AfterView], Field(description="The tasks that must end before it.")]
    failed_by: Annotated[str | None, Field(description="The first task in its chain that failed.")]
    retry_of: Annotated[str | None, Field(description="The ended task that this one runs again.")]
    labels: dict[str, str]
    model_type: str
    profile: str
    max_concurrency: Annotated[
        int | None, Field(description="Its process finds it in GPUBROKER_MAX_CONCURRENCY; no other effect.")
    ]
    stream: str
    result_format: str
    held: bool
    attempt: Annotated[int, Field(description="How often the task has been given devices.")]
    failures: Annotated[int, Field(description="Attempts that used up a retry.")]
    preemptions: int
    node: str | None
    devices: list[DeviceShare]
    ranks: Annotated[list[RankView] | None, Field(description="Of a gang that is placed.")]
    submitted_at: Time
    admitted_at: Time | None
    started_at: Time | None
    checkpoint_at: Time | None
    not_before: Time | None
    expires_at: Annotated[
        Time | None,
        Field(description="The end of its wait for a first start; null while it waits for other tasks."),
    ]
    deadline_at: Annotated[Time | None, Field(description="When it must have ended, or is stopped.")]
    finished_at: Time | None
    stop_reason: str | None
    stop_deadline_at: Annotated[Time | None, Field(description="When what is left of it is killed.")]
    phases: Annotated[
        PhasesView | None, Field(description="Null if the event log no longer goes back to its submit.")
    ]
    progress: ProgressView | None
    pending: PendingView | None
    eta: Annotated[ExpectedView | None, Field(description="When it is likely to end, while it runs.")]
    error: ErrorView | None
    quarantine: Annotated[
        list[QuarantinedView],
        Field(description="Its runs, also of earlier attempts, that are not confirmed to be gone."),
    ]
    notice: Annotated[
        str,
        Field(
            description="`paused: n2, n3 silent`, if these nodes are not given up and concern it; or empty."
        ),
    ]
    urls: TaskUrls


class TaskPage(TypedDict):
    items: list[TaskView]
    next_cursor: str | None
    has_more: bool


class ResultView(ResultFields):
    id: str
    state: str
    format: str
    error: ErrorView | None
    log_tail: Annotated[str, Field(description="The end of what the run wrote to stdout and stderr.")]
