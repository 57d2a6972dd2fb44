"""What a task asks for, from what clients say and back. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from itertools import groupby

from gpubroker_server.core.domain.demand import ANYWHERE, Demand, Labels, Where
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.core.planning.run_estimates import Size
from gpubroker_server.gateway.parts import Defaults, ModelType
from gpubroker_server.gateway.submission.demand_views import BundleView, DemandView
from gpubroker_server.gateway.submission.gpu_size import LEARNED, GpuSize
from gpubroker_server.gateway.submission.resources import Amounts, Bundle
from gpubroker_server.gateway.submission.task_body import SubmitTask

Learn = Callable[[Demand], Size]
"""What earlier runs used of the devices that whoever asks for this may use."""

NO_TYPE = ModelType()
"""Of a task that names no model type, or one of which nothing is usual."""


def subject_of(body: SubmitTask) -> str:
    """As `Task.subject`."""
    return body.model_type or body.name or getattr(body.run, "entrypoint", "")


def demand_of(body: SubmitTask, defaults: Defaults, learn: Learn | None = None) -> Demand:
    """A GPU size without a number of GPUs means one. CPU left out is the default, or none beside GPUs.

    `learn`: what a size comes to that is to be learned; None: whole devices.
    """
    if body.resources.bundles:
        return _gang_demand(body, defaults, learn)
    resources = body.resources.settled()
    gpu_mb = resources.gpu_mb if resources.mentions_gpus else _usual(body, defaults).gpu_mb
    return _demand(resources, gpu_mb, body, defaults, learn)


def _gang_demand(body: SubmitTask, defaults: Defaults, learn: Learn | None) -> Demand:
    """One demand per rank. What is said beside the bundles holds for each that does not say it itself."""
    resources = body.resources
    common = _where_of(resources, ANYWHERE)
    ranks: list[Demand] = []
    for bundle in resources.bundles:
        rank = _demand(bundle, _gpu_mb_of_rank(bundle, body, defaults), body, defaults, learn, common)
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


def _gpu_mb_of_rank(bundle: Bundle, body: SubmitTask, defaults: Defaults) -> GpuSize | None:
    """As the bundle says. What is usual for the model type holds where it names devices and no more, and for
    all ranks if none of them says anything of GPUs: which of several have some the bundles say alone."""
    if bundle.mentions_gpus:
        return bundle.gpu_mb
    nobody_says = not any(one.mentions_gpus or one.names_devices for one in body.resources.bundles)
    return _usual(body, defaults).gpu_mb if bundle.names_devices or nobody_says else None


def _usual(body: SubmitTask, defaults: Defaults) -> ModelType:
    return defaults.model_types.get(body.model_type, NO_TYPE)


def _demand(
    asked: Amounts,
    gpu_mb: GpuSize | None,
    body: SubmitTask,
    defaults: Defaults,
    learn: Learn | None,
    common: Where = ANYWHERE,
) -> Demand:
    """Of a task, or of one rank. `common`: what holds where it says nothing itself."""
    usual = _usual(body, defaults)
    wants_gpu = asked.wants_gpu or asked.names_devices or gpu_mb is not None
    gpus = int(wants_gpu) if asked.gpus is None else asked.gpus
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
    return demand if gpu_mb != LEARNED or learn is None else replace(demand, gpu_mb=learn(demand).gpu_mb)


_WHERE_FIELDS = tuple(field.name for field in fields(Where))


def _where_of(asked: Amounts, common: Where) -> Where:
    """As it says itself; `common` where it says nothing, which most do."""
    if asked.model_fields_set.isdisjoint(_WHERE_FIELDS):
        return common
    said = Where(
        kinds=tuple(asked.kinds),
        min_power=asked.min_power,
        min_device_mb=Mib(asked.min_device_mb),
        nodes=_labels_of(asked.nodes),
        prefer_kinds=tuple(asked.prefer_kinds),
        prefer_nodes=_labels_of(asked.prefer_nodes),
    )
    return replace(common, **{name: value for name in _WHERE_FIELDS if (value := getattr(said, name))})


def _labels_of(wanted: Mapping[str, list[str]]) -> Labels:
    return tuple(sorted((label, tuple(sorted(set(values)))) for label, values in wanted.items()))


def resources_view(demand: Demand) -> DemandView:
    where = demand.where
    return {
        "gpus": demand.gpus,
        "gpu_mb": demand.gpu_mb,
        "gpu_fraction": demand.gpu_fraction,
        "exclusive": demand.exclusive,
        "cpu": demand.cpu,
        "memory_mb": demand.memory_mb,
        "custom": dict(demand.custom),
        "kinds": list(where.kinds),
        "min_power": where.min_power,
        "min_device_mb": where.min_device_mb,
        "nodes": {label: list(values) for label, values in where.nodes},
        "prefer_kinds": list(where.prefer_kinds),
        "prefer_nodes": {label: list(values) for label, values in where.prefer_nodes},
        "pool": demand.pool,
        "bundles": _bundle_views(demand) if demand.bundles else None,
        "strategy": demand.strategy if demand.bundles else None,
        "min_ranks": demand.least_ranks if demand.bundles else None,
    }


def _bundle_views(demand: Demand) -> list[BundleView]:
    return [_bundle_view(bundle, len(list(alike))) for bundle, alike in groupby(demand.bundles)]


def _bundle_view(bundle: Demand, count: int) -> BundleView:
    where = bundle.where
    return {
        "count": count,
        "gpus": bundle.gpus,
        "gpu_mb": bundle.gpu_mb,
        "gpu_fraction": bundle.gpu_fraction,
        "exclusive": bundle.exclusive,
        "cpu": bundle.cpu,
        "memory_mb": bundle.memory_mb,
        "custom": dict(bundle.custom),
        "kinds": list(where.kinds),
        "nodes": {label: list(values) for label, values in where.nodes},
    }
