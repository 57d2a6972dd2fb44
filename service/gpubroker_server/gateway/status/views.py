"""What the API answers. Clients must accept more fields and more values than they know."""

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.gateway.status.quarantine_views import AwaitedView, QuarantinedView
from gpubroker_server.gateway.status.quarantine_views import Time as Time
from gpubroker_server.gateway.submission.demand_views import DeviceShare, Overused, RankView, ResourcesView
from gpubroker_server.gateway.tasks.estimates import SizingView


class RunView(TypedDict):
    kind: Annotated[str, Field(description="entrypoint, command, function, inference, model or external.")]
    entrypoint: str | None
    command: list[str] | None
    model: Annotated[str | None, Field(description="Of an inference: who is to answer it.")]


class ProgressView(TypedDict):
    fraction: float | None
    message: str
    at: Time


class ExpectedView(TypedDict):
    """When something is likely to happen; the same wherever the API tells of the future."""

    p50_at: Time
    p90_at: Time
    p50_seconds: Annotated[float, Field(description="From now on; one in two takes no longer.")]
    p90_seconds: Annotated[float, Field(description="From now on; nine in ten take no longer.")]
    n: Annotated[int, Field(description="Of how many runs this speaks; 0: of none.")]
    basis: Annotated[
        str,
        Field(
            description="What it rests on: `stated` run times, limits and notices; `learned` run times; or a "
            "`guess` at runs of which nobody knows how long they take."
        ),
    ]


class InheritsView(TypedDict):
    """By whose priority a task stands in the queue: that one waits for it, if only through others."""

    priority: int
    task: str


class PendingView(TypedDict):
    """Why a task waits."""

    reason: Annotated[str, Field(description="A stable token.")]
    message: str
    position: Annotated[int | None, Field(description="1 is next.")]
    inherits: Annotated[InheritsView | None, Field(description="Null if it stands by its own priority.")]
    start: Annotated[
        ExpectedView | None,
        Field(description="Told to the first tasks of the queue; null if nobody can tell."),
    ]


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
    """One of both, where a task has ended."""

    result: Annotated[Any, Field(description="The value, if it is JSON; null if the task left none.")]
    data_base64: Annotated[str, Field(description="The bytes, if they are not JSON.")]


class TaskView(ResultFields):
    """A task as it stands. `pending` is told in answers about a single task, not in lists.

    `result` or `data_base64` are there only in answers that waited for the end.
    """

    id: str
    name: str
    tenant: str
    state: str
    priority: int
    band: str
    run: RunView
    resources: ResourcesView
    sizing: Annotated[SizingView | None, Field(description="How `gpu_mb: learned` was settled at submit.")]
    placement: str
    max_retries: int
    timeout_seconds: float | None
    grace_seconds: float
    expected_seconds: Annotated[float | None, Field(description="Of one run, as the submitter said.")]
    queue_ttl_seconds: float | None
    after: Annotated[list[AfterView], Field(description="The tasks whose end it waits for.")]
    failed_by: Annotated[
        str | None, Field(description="The first task of the chain because of which it failed.")
    ]
    labels: dict[str, str]
    model_type: str
    stream: str
    result_format: str
    held: bool
    attempt: Annotated[int, Field(description="How often the task was given devices so far.")]
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
        Field(description="Until then it waits for its first start; null while it waits for other tasks."),
    ]
    deadline_at: Annotated[Time | None, Field(description="By then it has ended, or is told to stop.")]
    finished_at: Time | None
    stop_reason: str | None
    stop_deadline_at: Annotated[Time | None, Field(description="Whatever is left then is killed.")]
    progress: ProgressView | None
    pending: PendingView | None
    eta: Annotated[ExpectedView | None, Field(description="When it is likely to end, while it runs.")]
    error: ErrorView | None
    quarantine: Annotated[
        list[QuarantinedView],
        Field(description="Its runs, also of earlier attempts, that nobody can confirm to be gone."),
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


class EventView(TypedDict):
    position: Annotated[int, Field(description="Place in the log; gap-free, in commit order.")]
    at: Time
    kind: str
    key: Annotated[str, Field(description="The row that changed.")]
    version: int
    fields: dict[str, Any]


class EventPage(TypedDict):
    items: list[EventView]
    next_after: Annotated[int, Field(description="Pass it as `after` to go on.")]
    oldest: Annotated[
        int, Field(description="Position of the first event that is kept; what was before is not told.")
    ]


class AsOf(TypedDict):
    as_of: Annotated[Time, Field(description="When the newest event in this picture was committed.")]
    age_seconds: Annotated[float, Field(description="Since the picture was last known to be current.")]
    position: Annotated[int, Field(description="Of the newest event in this picture.")]


class HolderView(TypedDict):
    """Who holds memory. `id` and `name` are null for other tenants' holders, unless an admin asks."""

    kind: str
    id: str | None
    name: str | None
    tenant: str
    priority: int
    band: str
    gpu_mb: int
    context_mb: Annotated[int, Field(description="Of `gpu_mb`, the process's own cost beyond its demand.")]
    measured_mb: int
    overused_mb: Overused
    state: str
    since: Time
    stopping: bool
    quarantine: Annotated[AwaitedView | None, Field(description="While its state is quarantined.")]


class PledgeView(TypedDict):
    """Memory that is being freed for one waiting task; `task` is null if it is another tenant's."""

    task: str | None
    gpu_mb: int
    arrived_mb: Annotated[int, Field(description="How much of it is free already, and kept for the task.")]
    priority: int
    deadline_at: Time


class GpuView(TypedDict):
    key: str
    uuid: str
    node: str
    kind: str
    index: int
    simulated: bool
    parent: Annotated[str, Field(description="UUID of the GPU of which it is an instance; empty for GPUs.")]
    split: Annotated[bool, Field(description="It has instances: they are leased, and it is not.")]
    power: Annotated[int, Field(description="Rank of its kind; more is stronger, 0 is not ranked.")]
    context_mb: Annotated[int, Field(description="What each process takes beyond what it asked for.")]
    present: Annotated[bool, Field(description="False once its node no longer has it; kept while leased.")]
    physical_mb: int
    reserve_mb: Annotated[int, Field(description="Never leased.")]
    leased_mb: int
    used_mb: Annotated[int | None, Field(description="As measured; null before the first sample.")]
    foreign_mb: Annotated[int, Field(description="Used by processes without a lease.")]
    unaccounted_mb: Annotated[
        int, Field(description="Used beyond what holders and foreign processes explain.")
    ]
    pledged_mb: int
    free_mb: Annotated[int, Field(description="What a task without a pledge could take now.")]
    stranded_mb: Annotated[int, Field(description="Of that, what the usual demands cannot use.")]
    utilization: Annotated[float | None, Field(description="0 to 1, as last measured.")]
    sampled_at: Time | None
    stale: Annotated[bool, Field(description="Not measured lately: takes nothing new.")]
    holders: list[HolderView]
    pledges: list[PledgeView]


class GpuList(AsOf):
    items: list[GpuView]


class QuarantineList(AsOf):
    items: list[QuarantinedView]


class ReleasedView(TypedDict):
    """What an operator stated to be gone."""

    id: str
    gpu_mb: Annotated[int, Field(description="Of all its devices together.")]
    devices: Annotated[list[str], Field(description="Their UUIDs.")]
    quarantine: Annotated[list[QuarantinedView], Field(description="What of it is still in quarantine.")]


class Amount(TypedDict):
    total: float
    used: float


class MebibyteAmount(TypedDict):
    total: int
    used: int


class RunAmount(TypedDict):
    limit: int
    used: int


class AgentView(TypedDict):
    release: Annotated[str | None, Field(description="Of gpubroker; null if it does not say.")]
    protocol: Annotated[int, Field(description="The form in which it speaks with the leader.")]
    outdated: Annotated[bool, Field(description="It is of an earlier release than the leader.")]
    message: Annotated[str | None, Field(description="What becomes of it, and what is to be done.")]


class NodeView(TypedDict):
    name: str
    ready: Annotated[bool, Field(description="Its agent has answered the leader.")]
    silent_since: Annotated[
        Time | None,
        Field(
            description="When the leader last heard of its agent, if that is longer ago than two beats; "
            "null otherwise."
        ),
    ]
    cordoned: bool
    incarnation: Annotated[str, Field(description="Changes with each start of the node's agent.")]
    cpu: Amount
    memory_mb: MebibyteAmount
    runs: RunAmount
    gpus: int
    labels: dict[str, str]
    agent: Annotated[AgentView | None, Field(description="Null while it does not answer.")]


class NodeList(AsOf):
    items: list[NodeView]


class GpuTotals(TypedDict):
    total_mb: int
    leased_mb: int
    used_mb: int
    free_mb: int
    utilization: Annotated[float | None, Field(description="Mean over the measured devices, 0 to 1.")]


class TaskCounts(TypedDict):
    """The last four count every task that ever ended so, also those no longer kept."""

    pending: int
    admitted: int
    running: int
    stopping: int
    succeeded: int
    failed: int
    cancelled: int
    expired: int


class ExecutorView(TypedDict):
    state: str
    address: str
    message: str


class LeaderView(TypedDict):
    """Whoever leads, in this process or in another one."""

    term: Annotated[int | None, Field(description="Null if nobody is known to lead.")]
    holder: Annotated[str | None, Field(description="host:process; null if nobody is known to lead.")]


class ForecastsView(TypedDict):
    """How true the first forecasts of starts came, by what they rested on."""

    basis: Annotated[str, Field(description="stated, learned or guess.")]
    n: Annotated[int, Field(description="Starts that were foretold, at most 1000; recent ones count more.")]
    median_error_seconds: Annotated[float, Field(description="From the foretold start, either way.")]
    within_p90: Annotated[float, Field(description="The share that started by the p90; 0.9 is right.")]


class TokenView(TypedDict):
    name: str
    tenant: str
    scopes: list[str]
    max_priority: int
    created_at: Time
    expires_at: Time | None


class NewToken(TokenView):
    token: Annotated[str, Field(description="The secret. It is shown here and nowhere else.")]


class TokenList(TypedDict):
    items: list[TokenView]


class Health(TypedDict):
    status: Literal["ok"]


class Readiness(TypedDict):
    """Each part is `ok` or says in one word what it is instead. While `nodes` are `paused` it is ready:
    all but the silent ones work."""

    status: Literal["ready", "not_ready"]
    parts: dict[str, str]


class Stopping(TypedDict):
    stopping: Literal[True]
    stop_cluster: bool
