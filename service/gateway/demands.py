"""What a task asks for, from what clients say and back. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby

from service.core.demand import Demand, Labels, Where
from service.core.expectations import Size
from service.core.units import Mib
from service.gateway.demand_views import BundleView, DemandView
from service.gateway.gpu_size import LEARNED, GpuSize
from service.gateway.parts import Defaults, ModelType
from service.gateway.resources import Amounts, Bundle
from service.gateway.schemas import SubmitTask

NO_TYPE = ModelType()
"""Of a task that names no model type, or one of which nothing is usual."""


def subject_of(body: SubmitTask) -> str:
    """As `Task.subject`."""
    return body.model_type or body.name or getattr(body.run, "entrypoint", "")


def gpu_mb_of(body: SubmitTask, defaults: Defaults) -> GpuSize | None:
    """As the submit says, else as is usual for its model type, if it says nothing of GPUs at all."""
    usual = defaults.model_types.get(body.model_type, NO_TYPE)
    resources = body.resources.settled()
    return resources.gpu_mb if resources.mentions_gpus else usual.gpu_mb


def demand_of(body: SubmitTask, defaults: Defaults, learned: Size | None = None) -> Demand:
    """A GPU size without a number of GPUs means one. CPU left out is the default, or none beside GPUs."""
    if body.resources.bundles:
        return _gang_demand(body, defaults)
    resources, usual = body.resources.settled(), defaults.model_types.get(body.model_type, NO_TYPE)
    gpu_mb = gpu_mb_of(body, defaults)
    wants_gpu = resources.wants_gpu or resources.names_devices or gpu_mb is not None
    gpus = int(wants_gpu) if resources.gpus is None else resources.gpus
    if gpu_mb == LEARNED:
        gpu_mb = None if learned is None else learned.gpu_mb
    cpu = usual.cpu if usual.cpu is not None else 0.0 if gpus else defaults.cpu
    return Demand(
        gpus=gpus,
        gpu_mb=None if gpu_mb is None else Mib(gpu_mb),
        gpu_fraction=resources.gpu_fraction,
        exclusive=resources.exclusive,
        cpu=cpu if resources.cpu is None else resources.cpu,
        memory_mb=Mib((usual.memory_mb or 0) if resources.memory_mb is None else resources.memory_mb),
        custom=tuple(sorted(resources.custom.items())),
        placement=body.placement,
        where=_where_of(resources),
    )


def _gang_demand(body: SubmitTask, defaults: Defaults) -> Demand:
    """One demand per rank. What is said beside the bundles holds for each that does not say it itself."""
    resources = body.resources
    common = _where_of(resources)
    ranks = [
        rank
        for bundle in resources.bundles
        for rank in [_rank_demand(bundle, body, common, defaults)] * bundle.count
    ]
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


def _rank_demand(bundle: Bundle, body: SubmitTask, common: Where, defaults: Defaults) -> Demand:
    """What is usual for the model type holds for each rank. Which ranks have GPUs the bundles say alone."""
    usual = defaults.model_types.get(body.model_type, NO_TYPE)
    gpus = int(bundle.wants_gpu or bundle.names_devices) if bundle.gpus is None else bundle.gpus
    where = _where_of(bundle)
    own = {name: value for name in Where.__slots__ if (value := getattr(where, name))}
    cpu = usual.cpu if usual.cpu is not None else 0.0 if gpus else defaults.cpu
    return Demand(
        gpus=gpus,
        gpu_mb=None if bundle.gpu_mb is None else Mib(bundle.gpu_mb),
        gpu_fraction=bundle.gpu_fraction,
        exclusive=bundle.exclusive,
        cpu=cpu if bundle.cpu is None else bundle.cpu,
        memory_mb=Mib((usual.memory_mb or 0) if bundle.memory_mb is None else bundle.memory_mb),
        custom=tuple(sorted(bundle.custom.items())),
        placement=body.placement,
        where=replace(common, **own),
    )


def _where_of(resources: Amounts) -> Where:
    return Where(
        kinds=tuple(resources.kinds),
        min_power=resources.min_power,
        min_device_mb=Mib(resources.min_device_mb),
        nodes=_labels_of(resources.nodes),
        prefer_kinds=tuple(resources.prefer_kinds),
        prefer_nodes=_labels_of(resources.prefer_nodes),
    )


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
