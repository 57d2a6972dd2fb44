"""The sections of the settings: what each may hold, and its default."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import NoDecode

from gpubroker_server.core.domain.device import SHIPPED_KINDS
from gpubroker_server.core.domain.policy import BAND_NAMES


def comma_separated(value: Any) -> Any:
    """The environment gives lists as comma-separated words; anything else is left as it is."""
    if not isinstance(value, str):
        return value
    return [word.strip() for word in value.split(",") if word.strip()]


def band_value(value: Any) -> Any:
    if not isinstance(value, str) or value.isdecimal():
        return value
    if value not in BAND_NAMES:
        raise ValueError(f"should be 0 to 100 or one of {', '.join(BAND_NAMES)}; found {value!r}")
    return BAND_NAMES[value]


Words = Annotated[list[str], NoDecode, BeforeValidator(comma_separated)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SimulatedInstance(Section):
    """A part of a simulated device that is leased by itself, as instances of MIG are."""

    kind: str = "simulated instance"
    memory_mb: Annotated[int, Field(gt=0, le=4_194_304)]
    count: Annotated[int, Field(gt=0, le=7)] = 1


class SimulatedDevice(Section):
    """Devices that exist only in the ledger: for trying things out, and for tests."""

    kind: str = "simulated"
    memory_mb: Annotated[int, Field(gt=0, le=4_194_304)]
    count: Annotated[int, Field(gt=0, le=1024)] = 1
    instances: list[SimulatedInstance] = []
    """With any, they are leased and the device itself is not."""


class RaySettings(Section):
    address: str = ""
    """`host:port` of a cluster to join; empty starts a local Ray."""
    node_name: str = "local"
    cluster: str = "local"
    spares: Annotated[int, Field(ge=0, le=64)] = 2
    """Blank processes kept ready per node, so that no start waits for a fresh one."""
    warm_runners: Annotated[int, Field(ge=0, le=64)] = 1
    """Processes per node that small tasks without GPU share."""
    cpu: Annotated[float, Field(gt=0)] | None = None
    """CPUs a node offers; empty: what it has."""
    memory_mb: Annotated[int, Field(gt=0)] | None = None
    max_runs: Annotated[int, Field(gt=0)] = 256
    """How many runs may be on one node at once, however small."""
    process_memory_mb: Annotated[int, Field(gt=0)] = 81_920
    """Host memory that each process of a run may take, whatever the run asked for."""
    object_store_mb: Annotated[int, Field(ge=75)] = 128
    idle_stop_seconds: Annotated[float, Field(gt=0)] = 600.0
    """A local Ray without a broker and without runs stops by itself after so long."""

    inherit_env: Words = []
    """Names of the service's environment variables that tasks get too."""


class CustomSettings(Section):
    """A custom resource: how much there is of it, and for whom."""

    limit: Annotated[float, Field(ge=0)]
    per: Literal["cluster", "node"] = "cluster"
    """Of `node`, each node has so much."""
    priority_threshold: Annotated[int, Field(ge=0, le=100), BeforeValidator(band_value)] = 0
    """Tasks of lower priority are given none."""


def _limit_alone(value: Any) -> Any:
    """A number is the amount that the cluster has in all."""
    return {"limit": value} if isinstance(value, int | float | str) else value


class RunningSettings(Section):
    """How many tasks may run at once; `*` stands for every other one, each counted by itself."""

    tenants: dict[str, Annotated[int, Field(ge=0)]] = {}
    labels: dict[str, Annotated[int, Field(ge=0)]] = {}
    """By `key=value`, or by `key=*`."""

    @field_validator("labels")
    @classmethod
    def _labels_have_values(cls, labels: dict[str, int]) -> dict[str, int]:
        for label in labels:
            if not all(label.partition("=")):
                raise ValueError(f"{label!r} names no value of a label; write key=value or key=*")
        return labels


class PoolSettings(Section):
    """A part of the cluster that tasks name: devices and nodes, amounts that all of them share, or both."""

    kinds: list[str] = []
    nodes: dict[str, list[str]] = {}
    fractions: bool = True
    """Parts of a GPU are given, not only whole ones."""
    cpu: Annotated[float, Field(ge=0)] | None = None
    gpus: Annotated[int, Field(ge=0)] | None = None
    gpu_mb: Annotated[int, Field(ge=0)] | None = None
    memory_mb: Annotated[int, Field(ge=0)] | None = None
    custom: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Of custom resources, which policy.custom_limits names too."""


class MaximumSettings(Section):
    """The most that one task may ask for; what is left out is not limited."""

    gpus: Annotated[int, Field(ge=0)] | None = None
    gpu_mb: Annotated[int, Field(gt=0)] | None = None
    """MiB per GPU. Whole GPUs and shares are not given then: they differ from GPU to GPU."""
    cpu: Annotated[float, Field(ge=0)] | None = None
    memory_mb: Annotated[int, Field(ge=0)] | None = None
    timeout_seconds: Annotated[float, Field(gt=0)] | None = None
    """Tasks that state no limit for a run get this one."""
    max_retries: Annotated[int, Field(ge=0)] | None = None
    grace_seconds: Annotated[float, Field(ge=0)] | None = None


class TenantSettings(Section):
    """What a tenant may have, and how it stands beside others."""

    cohort: str = ""
    guaranteed_mb: Annotated[int, Field(ge=0)] | None = None
    """MiB of GPU memory; empty: no quota."""
    borrow_mb: Annotated[int, Field(ge=0)] | None = None
    """MiB beyond the guarantee; empty: as much as the cohort leaves."""
    weight: Annotated[float, Field(gt=0, le=1_000_000)] = 1.0
    max_priority: Annotated[int, Field(ge=0, le=100), BeforeValidator(band_value)] = 100

    @model_validator(mode="after")
    def _borrows_from_a_cohort(self) -> "TenantSettings":
        if self.cohort and self.guaranteed_mb is None:
            raise ValueError("a member of a cohort needs guaranteed_mb (0: it has only what it borrows)")
        if self.borrow_mb is not None and not self.cohort:
            raise ValueError("borrow_mb is borrowed from a cohort; name the cohort")
        return self


class PolicySettings(Section):
    ageing_seconds_per_point: Annotated[float, Field(gt=0)] = 60.0
    placement: Literal["stranded", "fgd", "best_fit", "spread"] = "stranded"
    """Where of several places a task goes that does not say `spread`."""
    preemption: bool = True
    preemption_budget: Annotated[int, Field(ge=0)] = 3
    shield_seconds: Annotated[float, Field(ge=0)] = 600.0
    pledge_patience_seconds: Annotated[float, Field(gt=0)] = 10.0
    kill_patience_seconds: Annotated[float, Field(gt=0)] = 10.0
    sample_period_seconds: Annotated[float, Field(gt=0)] = 2.0
    beat_seconds: Annotated[float, Field(ge=0.1, le=60)] = 2.0
    """So often each node's agent says that it is there."""
    beats_missed: Annotated[int, Field(ge=2, le=1000)] = 3
    """A node of which nothing was heard for so many beats is given up: its runs start elsewhere."""
    pause_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    pause_nodes: Annotated[int, Field(ge=1)] = 2
    """When so many nodes or more, with more than that share of all runs, fall silent at once, none is given
    up before an operator says so."""
    gang_start_seconds: Annotated[float, Field(gt=0)] = 300.0
    retry_first_seconds: Annotated[float, Field(gt=0)] = 1.0
    retry_factor: Annotated[float, Field(ge=1)] = 2.0
    retry_cap_seconds: Annotated[float, Field(gt=0)] = 300.0
    learned_margin: Annotated[float, Field(ge=0, le=10)] = 0.15
    """What a learned size has beyond what 95 of 100 runs used at most, as a share of that."""
    learned_least_runs: Annotated[int, Field(ge=1, le=1000)] = 5
    overuse: Literal["report", "stop"] = "report"
    """What becomes of a run that uses more of a GPU than it leased."""
    overuse_tolerance: Annotated[float, Field(ge=0, le=10)] = 0.05
    """So much more than its lease, as a share of it, a run may use."""
    forecasts: Annotated[int, Field(ge=0, le=1000)] = 8
    """So many tasks, the first that wait for room, are told when they will start, and nobody behind delays
    that."""
    backfill_depth: Annotated[int, Field(ge=1)] = 64
    """After so many tasks were kept away by forecasts in one cycle, no others are tried there."""
    consolidation: Annotated[int, Field(ge=0, le=10_000)] = 0
    """So many runs an hour that have saved checkpoints may be moved, so that others fit; 0: none."""
    custom_limits: dict[str, Annotated[CustomSettings, BeforeValidator(_limit_alone)]] = {}
    """Amounts of custom resources, by name."""
    max_running: RunningSettings = RunningSettings()
    maximum: MaximumSettings = MaximumSettings()
    tenants: dict[str, TenantSettings] = {}
    """By name; `*` stands for each that is not listed."""
    usage_half_life_seconds: Annotated[float, Field(gt=0)] = 86_400.0
    streams: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Weights of work streams."""
    min_run_seconds: Annotated[float, Field(ge=0)] = 0.0

    @field_validator("tenants")
    @classmethod
    def _others_guarantee_nothing_together(
        cls, tenants: dict[str, TenantSettings]
    ) -> dict[str, TenantSettings]:
        others = tenants.get("*")
        if others is not None and others.cohort and others.guaranteed_mb:
            raise ValueError(
                '"*" stands for any number of tenants, whose guarantees no cohort could add up; '
                "give it guaranteed_mb: 0, or no cohort, or list the tenants"
            )
        return tenants


class LimitSettings(Section):
    body_bytes: Annotated[int, Field(gt=0)] = 8 * 1024 * 1024
    """The largest body of a request."""
    batch_body_bytes: Annotated[int, Field(gt=0)] = 16 * 1024 * 1024
    """The same of a batch, which may have 10,000 tasks."""
    object_bytes: Annotated[int, Field(gt=0)] = 16 * 1024 * 1024
    """The largest object that is uploaded, and the most that the objects of one inference have together."""
    tenant_object_bytes: Annotated[int, Field(ge=0)] = 4 * 1024**3
    """All objects that a tenant has uploaded, each counted as 4 KiB at least."""
    tenant_objects: Annotated[int, Field(ge=0)] = 10_000
    """So many of them. Each upload counts them while nobody else writes: some 2 ms for each thousand."""
    inline_bytes: Annotated[int, Field(gt=0)] = 64 * 1024
    """Arguments and results up to this size stay in the row; larger ones become blobs."""
    result_bytes: Annotated[int, Field(gt=0)] = 64 * 1024 * 1024
    checkpoint_bytes: Annotated[int, Field(gt=0)] = 16 * 1024 * 1024
    """Larger checkpoints are kept by the task itself, which hands over a URI."""
    stale_seconds: Annotated[float, Field(gt=0)] = 30.0
    """Overviews older than this are refused with 503."""


class RetentionSettings(Section):
    finished_seconds: Annotated[float, Field(gt=0)] = 7 * 86400.0
    """So long after its end a task can be read, with its result, its log and its events."""
    idempotency_seconds: Annotated[float, Field(gt=0)] = 86400.0
    """So long after a submit its key is known, at least: tasks that were submitted with one stay so long."""
    object_seconds: Annotated[float, Field(gt=0)] = 86400.0
    """So long after its last use an uploaded object is kept."""
    audit_seconds: Annotated[float, Field(gt=0)] = 365 * 86400.0
    """So long it can be read who did what."""


class DefaultSettings(Section):
    """What a submit that leaves it out gets."""

    priority: Annotated[int, Field(ge=0, le=100), BeforeValidator(band_value)] = BAND_NAMES["batch"]
    """A number, or the name of a band, which stands for its middle."""
    cpu: Annotated[float, Field(ge=0)] = 1.0
    """For tasks without a GPU; those with one take none unless they say so."""
    max_retries: Annotated[int, Field(ge=0, le=100)] = 0
    grace_seconds: Annotated[float, Field(ge=0, le=3600)] = 30.0


class KindSettings(Section):
    """A kind of GPU; its name is found as words in what the driver reports."""

    power: Annotated[int, Field(ge=0)] = 0
    context_mb: Annotated[int, Field(ge=0)] = 0
    """MiB that each process takes there beyond what it asked for."""


Kinds = dict[str, KindSettings]


def over_the_shipped(kinds: Any) -> Any:
    """What is said of a kind changes no other; of a shipped one all else stays. Null takes it out."""
    if not isinstance(kinds, dict):
        return kinds
    merged: dict[Any, Any] = {kind.name: {"power": kind.power} for kind in SHIPPED_KINDS}
    for name, said in kinds.items():
        said = {"power": said} if isinstance(said, int | str) else said
        merged[name] = {**merged.get(name, {}), **said} if isinstance(said, dict) else said
    return {name: said for name, said in merged.items() if said is not None}


class ModelTypeSettings(Section):
    """What a submit that names this model type and leaves it out gets."""

    priority: Annotated[int, Field(ge=0, le=100), BeforeValidator(band_value)] | None = None
    gpu_mb: Annotated[int, Field(gt=0)] | Literal["learned"] | None = None
    """Only for a submit that says nothing of GPUs. `learned`: what earlier runs of the type used."""
    cpu: Annotated[float, Field(ge=0)] | None = None
    memory_mb: Annotated[int, Field(ge=0)] | None = None
    timeout_seconds: Annotated[float, Field(gt=0)] | None = None
    max_retries: Annotated[int, Field(ge=0, le=100)] | None = None
