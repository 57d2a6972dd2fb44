"""Make the demand of a task from the resources that a submission asks for and the operator's defaults."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from gpubroker.wire.forecasts import Sizing
from msgspec.structs import fields, replace

from gpubroker_server.core.admission.defaults import LEARNED, GpuSize, NamedDefaults
from gpubroker_server.core.admission.facts import FleetLookup
from gpubroker_server.core.admission.feasibility import ranks_text
from gpubroker_server.core.admission.pools import apply_pool
from gpubroker_server.core.admission.sizing import size_of_ranks
from gpubroker_server.core.admission.submission import Asked
from gpubroker_server.core.domain.demand import NO_CONSTRAINTS, Demand, PlacementConstraints, interned
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.units import Mib

ProfileDefaults = Callable[[str], NamedDefaults]
"""A function that returns the defaults of a task that names this profile."""
LearnSize = Callable[[Demand], Sizing]
"""A function that returns the size that earlier runs used on the devices that a demand may use."""
_WHERE_FIELDS = tuple(field.name for field in fields(PlacementConstraints))


def settled_demand(
    asked: Asked,
    usual: NamedDefaults,
    of_profile: ProfileDefaults,
    default_cpu: float,
    fleet: FleetLookup,
    subject: str,
    tenant: str,
    labels: Mapping[str, str],
    policy: Policy,
) -> tuple[Demand, Sizing | None] | Refusal:
    """Return the demand, with the constraints and amounts of its pool and its limits, and how its size was
    learned, or None if it was stated. If the pool does not fit the demand, return the refusal.

    `usual` are the defaults of the task; a rank that names a profile has those that `of_profile` returns.
    """
    sizes: dict[Demand, Sizing] = {}

    def learn(demand: Demand) -> Sizing:
        return sizes.setdefault(demand, fleet.learned_size(demand, tenant, subject))

    demand = demand_of(asked, usual, of_profile, default_cpu, learn)
    pooled = apply_pool(demand, asked.pool, tenant, labels, policy, fleet.gpu_share)
    if isinstance(pooled, Refusal):
        return pooled
    return interned(pooled), _size_in(demand, sizes) if sizes else None


def demand_of(
    asked: Asked, usual: NamedDefaults, of_profile: ProfileDefaults, default_cpu: float, learn: LearnSize
) -> Demand:
    """Return the demand without the constraints and amounts of its pool.

    A GPU size without a number of GPUs means one GPU. If `cpu` is left out, it is the default, or 0 for a
    task with GPUs. If `gpu_mb` is `learned`, `learn` gives the size. A submission that states GPUs and no
    size gets whole devices.
    """
    if asked.bundles:
        return _gang_demand(asked, usual, of_profile, default_cpu, learn)
    gpu_mb = asked.gpu_mb if asked.mentions_gpus else usual.gpu_mb
    return _sized(_process_demand(asked, gpu_mb, usual, default_cpu, NO_CONSTRAINTS), gpu_mb, learn)


def _gang_demand(
    asked: Asked, usual: NamedDefaults, of_profile: ProfileDefaults, default_cpu: float, learn: LearnSize
) -> Demand:
    """Return the demand of a gang, with one demand per rank. Constraints beside the bundles hold for each
    rank that does not state its own."""
    ranks: list[Demand] = []
    for bundle in asked.bundles:
        own = of_profile(bundle.profile) if bundle.profile else usual
        gpu_mb = _rank_gpu_mb(bundle, asked, own)
        rank = _process_demand(bundle, gpu_mb, own, default_cpu, asked.where)
        ranks.append(_sized(rank, gpu_mb, learn))
    custom: dict[str, float] = {}
    least = len(ranks) if asked.min_ranks is None else asked.min_ranks
    for name, amount in (pair for rank in ranks[:least] for pair in rank.custom):
        custom[name] = custom.get(name, 0.0) + amount
    return Demand(
        custom=tuple(sorted(custom.items())),
        placement=asked.placement,
        bundles=tuple(ranks),
        strategy=asked.strategy,
        min_ranks=asked.min_ranks if asked.min_ranks != len(ranks) else None,
    )


def ranks_with_gpus_of_profile(asked: Asked, demand: Demand) -> Sequence[int]:
    """Return the ranks of a gang that state no GPUs beside ranks that do, and got those of the task's
    profile."""
    stated = [rank.mentions_gpus or rank.names_devices or bool(rank.profile) for rank in asked.bundles]
    if not any(stated):
        return ()
    ranks = zip(stated, demand.bundles, strict=True)
    return [number for number, (is_stated, rank) in enumerate(ranks) if rank.gpus and not is_stated]


def _rank_gpu_mb(bundle: Asked, gang: Asked, usual: NamedDefaults) -> GpuSize | None:
    """Return the bundle's own GPU size. The default size is used for a bundle that only restricts devices,
    and for all ranks if no bundle mentions GPUs or devices. A bundle with a profile of its own has the size
    of that."""
    if bundle.mentions_gpus:
        return bundle.gpu_mb
    if bundle.profile:
        return usual.gpu_mb
    none_mentions = not any(bundle.mentions_gpus or bundle.names_devices for bundle in gang.bundles)
    return usual.gpu_mb if bundle.names_devices or none_mentions else None


# Most tasks ask for the same resources as an earlier task, so the demand is computed once for all of them.
@lru_cache(4096)
def _process_demand(
    asked: Asked,
    gpu_mb: GpuSize | None,
    usual: NamedDefaults,
    default_cpu: float,
    common: PlacementConstraints,
) -> Demand:
    """Return the demand of a task, or of one rank, without a learned size. Constraints of `common` hold for
    fields in which `asked` states none."""
    wants_gpu = asked.wants_gpu or asked.names_devices or gpu_mb is not None
    gpus = max(int(wants_gpu), usual.gpus or 0) if asked.gpus is None else asked.gpus
    cpu = usual.cpu if usual.cpu is not None else 0.0 if gpus else default_cpu
    return Demand(
        gpus=gpus,
        gpu_mb=Mib(gpu_mb) if isinstance(gpu_mb, int) else None,
        gpu_fraction=asked.gpu_fraction,
        exclusive=asked.exclusive,
        cpu=cpu if asked.cpu is None else asked.cpu,
        memory_mb=Mib((usual.memory_mb or 0) if asked.memory_mb is None else asked.memory_mb),
        custom=asked.custom,
        placement=asked.placement,
        where=_merged(asked.where, common),
        answered_by=asked.answered_by,
    )


def _merged(own: PlacementConstraints, common: PlacementConstraints) -> PlacementConstraints:
    if common == NO_CONSTRAINTS:
        return own
    return replace(common, **{name: value for name in _WHERE_FIELDS if (value := getattr(own, name))})


def _sized(demand: Demand, gpu_mb: GpuSize | None, learn: LearnSize) -> Demand:
    return replace(demand, gpu_mb=learn(demand).gpu_mb) if gpu_mb == LEARNED else demand


def _size_in(demand: Demand, sizes: Mapping[Demand, Sizing]) -> Sizing | None:
    by_ranks = {
        ranks_text(demand, replace(rank, gpu_mb=size.gpu_mb)) if demand.bundles else "": size
        for rank, size in sizes.items()
    }
    return size_of_ranks(by_ranks)
