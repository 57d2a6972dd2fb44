"""Which demands are refused at the door, gangs among them: all ranks must fit at the same time."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.device import Device, Node
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Mib, TaskId
from gpubroker_server.core.explain.admission import Refusal, check, check_priority
from gpubroker_server.core.planning.gang_nodes import empty_grounds
from gpubroker_server.core.planning.gang_placement import may_fit
from gpubroker_server.core.world.world import World

IN_WORDS = {
    "pack": "at once",
    "spread": "at once",
    "strict_pack": "on one node (strict_pack)",
    "strict_spread": "each on a node of its own (strict_spread)",
}


def check_task(task: Task, world: World, policy: Policy) -> Refusal | None:
    """Why this task could never run on the World's machines, or never at its priority; or None."""
    devices = [book.device for book in world.books.values()]
    refusal = check_demand(task.demand, devices, world.nodes.values(), policy)
    return refusal or check_priority(task.demand, task.priority, policy)


def check_demand(
    demand: Demand, devices: Iterable[Device], nodes: Iterable[Node], policy: Policy
) -> Refusal | None:
    """Why this demand could never run, or None. Of a gang: which ranks, and why."""
    there, known = list(devices), list(nodes)
    if not demand.bundles:
        return check(demand, there, known, policy)
    refusal = check(_total(demand), (), (), policy)  # what is limited wherever it runs
    if refusal is not None:
        return replace(refusal, message=f"all ranks together: {refusal.message}", field="bundles")
    for bundle in dict.fromkeys(demand.bundles):
        refusal = check(bundle, there, known, policy)
        if refusal is not None:
            which = ranks_in_words(demand, bundle)
            return replace(refusal, message=f"{which}: {refusal.message}", field="bundles")
    return _too_many(demand, there, known) if known else None


def ranks_in_words(demand: Demand, bundle: Demand) -> str:
    """`rank 3`, `ranks 0 to 3` or `4 ranks from rank 1 on`: those that ask for this."""
    ranks = [rank for rank, other in enumerate(demand.bundles) if other == bundle]
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"{len(ranks)} ranks from rank {ranks[0]} on"


def _total(demand: Demand) -> Demand:
    """What the ranks it needs at least ask for in all; sizes of GPUs are judged rank by rank."""
    ranks = demand.bundles[: demand.least_ranks]
    gpus = sum(rank.gpus for rank in ranks)
    return Demand(
        gpus=gpus,
        gpu_mb=Mib(1) if gpus else None,
        cpu=sum(rank.cpu for rank in ranks),
        memory_mb=Mib(sum(rank.memory_mb for rank in ranks)),
        custom=demand.custom,
        slots=demand.slots,
    )


def _too_many(demand: Demand, devices: Sequence[Device], nodes: Sequence[Node]) -> Refusal | None:
    grounds = empty_grounds(nodes, devices)
    gang = Task(TaskId(""), "", "", 0, demand, Instant(0.0))
    least = demand.least_ranks
    if may_fit(gang, least, grounds):
        return None
    fit, too_many = 0, least
    while too_many - fit > 1:
        some = (fit + too_many) // 2
        fit, too_many = (some, too_many) if may_fit(gang, some, grounds) else (fit, some)
    ranks = f"{least} ranks" if least == len(demand.bundles) else f"the {least} ranks it needs at least"
    message = (
        f"{ranks} never fit {IN_WORDS[demand.strategy]}: even empty the cluster has room for {fit}, and "
        f"none for rank {fit} beside them; ask for fewer or smaller ranks, or for another strategy"
    )
    return Refusal("exceeds-capacity", message, "bundles")
