"""From the resources that a body names to the demand of its task, with the operator's defaults. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol

from gpubroker_server.core.domain.demand import NO_CONSTRAINTS, Demand, Labels, PlacementConstraints
from gpubroker_server.core.domain.policy import BAND_NAMES
from gpubroker_server.core.domain.units import Mib, Seconds
from gpubroker_server.core.planning.forecasts.run_estimates import Size
from gpubroker_server.gateway.submission.resources import LEARNED, Amounts, Bundle, GpuSize
from gpubroker_server.gateway.submission.task_body import SubmitTask

LearnSize = Callable[[Demand], Size]
"""What earlier runs used of the devices that a demand may use."""


_WHERE_FIELDS = tuple(field.name for field in fields(PlacementConstraints))


@dataclass(frozen=True, slots=True)
class NamedDefaults:
    """The defaults that a model type or a profile brings. None: the default of all tasks."""

    priority: int | None = None
    gpus: int | None = None
    """Only profiles have it; for a task that does not say how many GPUs."""
    gpu_mb: GpuSize | None = None
    """Only for a task that does not mention GPUs."""
    cpu: float | None = None
    memory_mb: int | None = None
    timeout_seconds: float | None = None
    max_retries: int | None = None
    max_concurrency: int | None = None
    """Only profiles have it."""

    def over(self, other: "NamedDefaults") -> "NamedDefaults":
        """These, and the other ones where these say nothing. Without GPUs there is no size of one."""
        if self.gpus == 0:
            other = replace(other, gpu_mb=None)
        own = {it.name: value for it in fields(self) if (value := getattr(self, it.name)) is not None}
        return replace(other, **own)


_NO_DEFAULTS = NamedDefaults()


class Limited(Protocol):
    """A body that may leave these to its model type, and to the defaults of all."""

    @property
    def model_type(self) -> str: ...
    @property
    def priority(self) -> int | None: ...
    @property
    def max_retries(self) -> int | None: ...
    @property
    def timeout_seconds(self) -> float | None: ...


class TaskLimits(NamedTuple):
    priority: int
    max_retries: int
    timeout_seconds: Seconds | None


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a task gets that leaves a field out."""

    priority: int = BAND_NAMES["batch"]
    cpu: float = 1.0
    max_retries: int = 0
    grace_seconds: Seconds = Seconds(30.0)
    timeout_seconds: Seconds | None = None
    model_types: Mapping[str, NamedDefaults] = field(default_factory=dict)
    profiles: Mapping[str, NamedDefaults] = field(default_factory=dict)

    def named(self, model_type: str, profile: str = "") -> NamedDefaults:
        """Those of a profile, over those of a model type."""
        usual = self.model_types.get(model_type, _NO_DEFAULTS)
        return self.profiles[profile].over(usual) if profile else usual

    def limits_of(self, body: Limited, profile: str = "") -> TaskLimits:
        usual = self.named(body.model_type, profile)
        return TaskLimits(
            first(body.priority, usual.priority, self.priority),
            first(body.max_retries, usual.max_retries, self.max_retries),
            first(body.timeout_seconds, usual.timeout_seconds, self.timeout_seconds),
        )


def first(*values: Any) -> Any:
    """The first that is not None; None if all are."""
    return next((value for value in values if value is not None), None)


def subject_of(body: SubmitTask) -> str:
    """As `Task.subject`."""
    return body.model_type or body.name or getattr(body.run, "entrypoint", "")


def demand_of(body: SubmitTask, defaults: Defaults, learn: LearnSize | None = None) -> Demand:
    """A GPU size without a number of GPUs means one GPU. CPU left out is the default, or 0 beside GPUs.

    `learn` gives the size for `gpu_mb: learned`, and for a task of a model type that asks for GPUs and
    states no size; None: whole devices.
    """
    if body.resources.bundles:
        return _gang_demand(body, defaults, learn)
    resources = body.resources.with_sizes()
    usual = defaults.named(body.model_type, body.profile)
    gpu_mb = resources.gpu_mb if resources.mentions_gpus else usual.gpu_mb
    return _demand(resources, gpu_mb, body, defaults, learn)


def _gang_demand(body: SubmitTask, defaults: Defaults, learn: LearnSize | None) -> Demand:
    """One demand per rank. Restrictions beside the bundles hold for each rank that has none of its own."""
    resources = body.resources
    common = _where_of(resources, NO_CONSTRAINTS)
    ranks: list[Demand] = []
    for bundle in resources.bundles:
        rank = _demand(bundle, _rank_gpu_mb(bundle, body, defaults), body, defaults, learn, common)
        ranks += [rank] * bundle.count
    custom: dict[str, float] = {}
    for name, amount in (pair for rank in ranks for pair in rank.custom):
        custom[name] = custom.get(name, 0.0) + amount
    return Demand(
        custom=tuple(sorted(custom.items())),
        placement=body.placement,
        bundles=tuple(ranks),
        strategy=resources.strategy,
        min_ranks=resources.min_ranks if resources.min_ranks != len(ranks) else None,
    )


def _rank_gpu_mb(bundle: Bundle, body: SubmitTask, defaults: Defaults) -> GpuSize | None:
    """The bundle's own size. The model type's size is for a bundle that only restricts devices, and for all
    ranks if no bundle mentions GPUs or devices."""
    if bundle.mentions_gpus:
        return bundle.gpu_mb
    none_mentions = not any(one.mentions_gpus or one.names_devices for one in body.resources.bundles)
    usual = defaults.named(body.model_type, body.profile)
    return usual.gpu_mb if bundle.names_devices or none_mentions else None


def _demand(
    asked: Amounts,
    gpu_mb: GpuSize | None,
    body: SubmitTask,
    defaults: Defaults,
    learn: LearnSize | None,
    common: PlacementConstraints = NO_CONSTRAINTS,
) -> Demand:
    """Of a task, or of one rank. `common` holds where `asked` has no restriction of its own."""
    usual = defaults.named(body.model_type, body.profile)
    wants_gpu = asked.wants_gpu or asked.names_devices or gpu_mb is not None
    gpus = max(int(wants_gpu), usual.gpus or 0) if asked.gpus is None else asked.gpus
    cpu = usual.cpu if usual.cpu is not None else 0.0 if gpus else defaults.cpu
    demand = Demand(
        gpus=gpus,
        gpu_mb=None if gpu_mb is None or gpu_mb == LEARNED else Mib(gpu_mb),
        gpu_fraction=asked.gpu_fraction,
        exclusive=asked.exclusive,
        cpu=cpu if asked.cpu is None else asked.cpu,
        memory_mb=Mib((usual.memory_mb or 0) if asked.memory_mb is None else asked.memory_mb),
        custom=tuple(sorted(asked.custom.items())),
        placement=body.placement,
        where=_where_of(asked, common),
    )
    # Runs of one model type are alike, so what they used is known better than what a whole GPU has.
    is_learned = gpu_mb == LEARNED or (demand.states_no_size and body.model_type != "")
    return replace(demand, gpu_mb=learn(demand).gpu_mb) if is_learned and learn is not None else demand


def _where_of(asked: Amounts, common: PlacementConstraints) -> PlacementConstraints:
    if asked.model_fields_set.isdisjoint(_WHERE_FIELDS):
        return common
    own = PlacementConstraints(
        kinds=tuple(asked.kinds),
        min_power=asked.min_power,
        min_device_mb=Mib(asked.min_device_mb),
        nodes=_labels_of(asked.nodes),
        prefer_kinds=tuple(asked.prefer_kinds),
        prefer_nodes=_labels_of(asked.prefer_nodes),
    )
    return replace(common, **{name: value for name in _WHERE_FIELDS if (value := getattr(own, name))})


def _labels_of(wanted: Mapping[str, list[str]]) -> Labels:
    return tuple(sorted((label, tuple(sorted(set(values)))) for label, values in wanted.items()))
