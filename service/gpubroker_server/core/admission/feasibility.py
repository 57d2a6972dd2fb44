"""Refuse demands that could never run here, however long they wait."""

from collections.abc import Iterable, Sequence

from gpubroker_server.core.domain.demand import Demand, may_use_device, may_use_node, need_mb
from gpubroker_server.core.domain.device import Device, Node
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.units import Mib, Seconds, in_gib


def check_priority(demand: Demand, priority: int, policy: Policy) -> Refusal | None:
    """Return the refusal of a custom resource that is only for higher priorities; None if there is none."""
    asked = dict(demand.custom)
    for limit in policy.custom_limits:
        if limit.name in asked and priority < limit.priority_threshold:
            message = (
                f"{limit.name!r} is for tasks of priority {limit.priority_threshold} and above, and this one "
                f"has {priority}; raise its priority, or drop {limit.name!r}"
            )
            return Refusal("priority-too-low", message, f"custom/{limit.name}")
    return None


def check(demand: Demand, devices: Iterable[Device], nodes: Iterable[Node], policy: Policy) -> Refusal | None:
    """Return the refusal of a demand that could never run; otherwise None. Nodes that are not ready count,
    because they may come back. While no node is known, as after a start, every size passes."""
    all_nodes = sorted(nodes, key=lambda node: node.name)
    refusal = _over_maximum(demand, policy) or _over_limit(demand, policy)
    if refusal is not None or not all_nodes:
        return refusal
    open_nodes = [node for node in all_nodes if may_use_node(demand, node)]
    if not open_nodes:
        return _no_such_node(demand, all_nodes)
    if not demand.gpus:
        return _over_nodes(demand, open_nodes)
    names = {node.name for node in open_nodes}
    named_devices = [device for device in devices if device.node in names]
    usable = [device for device in named_devices if may_use_device(demand, device)]
    if named_devices and not usable:
        return _no_such_device(demand, named_devices)
    return _over_devices(demand, usable, open_nodes)


def total_of(demand: Demand) -> Demand:
    """Return the sum of the demands of the ranks that a gang needs at least. GPU sizes are left out, because
    they are checked rank by rank."""
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


def new_nodes_could_take(demand: Demand, policy: Policy) -> bool:
    """Return True if the settings name an autoscaler, and no limit would keep the demand from a node that it
    adds."""
    if not policy.autoscaler:
        return False
    parts = (*demand.bundles, total_of(demand)) if demand.bundles else (demand,)
    return all(check(part, (), (), policy) is None for part in parts)


def waits_for_a_node(message: str, policy: Policy) -> str:
    """Return the text that says why a demand waits for a new node. `message` says why no present node could
    take it."""
    return f"it waits for a node that autoscaler {policy.autoscaler} may add: {message}"


def constraints_text(demand: Demand) -> str:
    """Return a text that names the devices and nodes that the task may use; empty if it may use all."""
    where = demand.where
    parts = [
        f"kinds {', '.join(where.kinds)}" if where.kinds else "",
        f"power {where.min_power} or more" if where.min_power else "",
        f"memory {in_gib(where.min_device_mb)} or more" if where.min_device_mb else "",
        f"UUID {' or '.join(where.devices)}" if where.devices else "",
        *(f"{label}={' or '.join(values)}" for label, values in where.nodes),
    ]
    return "; ".join(part for part in parts if part)


def _no_such_node(demand: Demand, nodes: Sequence[Node]) -> Refusal:
    there_are = ", ".join(_named(node) for node in nodes[:5]) + (", ..." if len(nodes) > 5 else "")
    message = (
        f"no node matches {constraints_text(demand)}; the nodes are {there_are}; "
        "ask for one of them, or label a node"
    )
    return Refusal("no-matching-device", message, "nodes")


def _named(node: Node) -> str:
    labels = ", ".join(f"{label}={value}" for label, value in node.labels)
    return f"{node.name} ({labels})" if labels else node.name


def _no_such_device(demand: Demand, devices: Sequence[Device]) -> Refusal:
    where = demand.where
    kinds = sorted({(device.kind, device.power, device.physical_mb) for device in devices})
    there_are = ", ".join(f"{kind} (power {power}, {in_gib(size)})" for kind, power, size in kinds[:5])
    message = f"no GPU matches {constraints_text(demand)}; the GPUs are {there_are}; ask for one of those"
    asked = {"kinds": where.kinds, "min_power": where.min_power, "devices": where.devices}
    field = next((name for name, value in asked.items() if value), "min_device_mb")
    return Refusal("no-matching-device", message, field)


def _over_maximum(demand: Demand, policy: Policy) -> Refusal | None:
    """Return the refusal of a demand above the operator's maximum; otherwise None. With a maximum size per
    GPU the demand must state its size, because whole GPUs and fractions differ in size from GPU to GPU."""
    maximum = policy.maximum
    has_no_fixed_size = demand.takes_whole_devices or demand.gpu_fraction is not None
    if maximum.gpu_mb is not None and has_no_fixed_size:
        message = (
            f"one task may have at most {in_gib(maximum.gpu_mb)} of a GPU here, so whole GPUs and shares are "
            "refused; state the size with gpu_mb"
        )
        return Refusal("exceeds-maximum", message, "gpu_mb")
    for field, asked, limit in (
        ("gpus", demand.gpus, maximum.gpus),
        ("gpu_mb", demand.gpu_mb or 0, maximum.gpu_mb),
        ("cpu", demand.cpu, maximum.cpu),
        ("memory_mb", demand.memory_mb, maximum.memory_mb),
    ):
        if limit is not None and asked > limit:
            message = f"{field} {asked}: one task may have at most {limit} here; ask for less"
            return Refusal("exceeds-maximum", message, field)
    return None


def check_times(
    timeout_seconds: Seconds | None, max_retries: int, grace_seconds: Seconds, policy: Policy
) -> Refusal | None:
    """Return the refusal of a timeout, of retries or of a grace period above the operator's maximum."""
    maximum = policy.maximum
    asked: tuple[tuple[str, float | None, float | None], ...] = (
        ("timeout_seconds", timeout_seconds, maximum.timeout_seconds),
        ("max_retries", max_retries, maximum.max_retries),
        ("grace_seconds", grace_seconds, maximum.grace_seconds),
    )
    for field, value, limit in asked:
        if limit is not None and value is not None and value > limit:
            message = f"{field} {value:g}: one task may have at most {limit:g} here; ask for less"
            return Refusal("exceeds-maximum", message, field)
    return None


def slot_text(slot: str) -> str:
    """Return the text for a shared limit, such as `the pool's gpus (pool research)` or `the running tasks of
    tenant acme`."""
    kind, _, name = slot.partition(":")
    if kind == "pool":
        pool, _, field = name.rpartition(":")
        return f"the pool's {field.removeprefix('custom/')} (pool {pool})"
    return f"the running tasks {'with label' if kind == 'label' else 'of tenant'} {name}"


def _over_limit(demand: Demand, policy: Policy) -> Refusal | None:
    limits = {limit.name: limit for limit in policy.custom_limits}
    for slot, asked in demand.slots:
        there_is = policy.limit_of(slot)
        if there_is is not None and asked > there_is:
            message = f"{asked:g} of {slot_text(slot)} exceed the limit of {there_is:g}; ask for less"
            return Refusal("exceeds-capacity", message, "pool")
    for name, asked in demand.custom:
        if name not in limits:
            configured = ", ".join(name for name in limits if ":" not in name) or "none"
            message = f"there is no resource {name!r}; configured are: {configured}"
            return Refusal("unknown-resource", message, f"custom/{name}")
        if asked > limits[name].amount:
            owner = "each node's" if limits[name].per_node else "the cluster's"
            message = f"{asked:g} of {name!r} exceed {owner} limit of {limits[name].amount:g}; ask for less"
            return Refusal("exceeds-capacity", message, f"custom/{name}")
    return None


def _over_devices(demand: Demand, devices: Sequence[Device], nodes: Sequence[Node]) -> Refusal | None:
    large_devices = [device for device in devices if need_mb(demand, device) is not None]
    if not large_devices:
        return _too_large(demand, devices)
    count = {node.name: 0 for node in nodes}
    for device in large_devices:
        count[device.node] += 1
    fullest = max(count, key=lambda name: count[name])
    if demand.gpus > count[fullest]:
        size = f" of {in_gib(demand.gpu_mb)}" if demand.gpu_mb is not None else ""
        message = (
            f"{demand.gpus} GPUs{size} on one node: the node with the most has {count[fullest]} ({fullest}); "
            "ask for fewer GPUs, or split the task"
        )
        return Refusal("exceeds-capacity", message, "gpus")
    return _over_nodes(demand, [node for node in nodes if count[node.name] >= demand.gpus])


def _too_large(demand: Demand, devices: Sequence[Device]) -> Refusal:
    if not devices:
        matching_node = (
            f"no node that matches {constraints_text(demand)}" if demand.where.nodes else "no node"
        )
        message = (
            f"the task asks for a GPU, and {matching_node} has one; add a node with GPUs, or ask for none"
        )
        return Refusal("exceeds-capacity", message, "gpus")
    largest = max(devices, key=lambda device: (device.allocatable_mb - device.context_mb, device.key))
    context_text = f" beside {in_gib(largest.context_mb)} for each process" if largest.context_mb else ""
    offers_mb = largest.allocatable_mb - largest.context_mb
    there_is = (
        f"{in_gib(offers_mb, demand.gpu_mb or 0)} of {largest.kind} {largest.node}/gpu{largest.index}"
        f"{context_text}"
    )
    if demand.gpu_mb is None:
        message = (
            f"{demand.gpu_fraction or 1:g} of a GPU is more than any GPU has; the largest offers {there_is}"
        )
        return Refusal("exceeds-capacity", message, "gpu_fraction")
    message = (
        f"{in_gib(demand.gpu_mb, offers_mb)} on one GPU exceed the largest, which offers {there_is}; "
        "ask for less per GPU and for more GPUs, or add a larger device"
    )
    return Refusal("exceeds-capacity", message, "gpu_mb")


def _over_nodes(demand: Demand, nodes: Sequence[Node]) -> Refusal | None:
    """Return the refusal of a demand for more CPU or host memory than any of these nodes has; otherwise None.
    All of `nodes` have enough GPUs."""
    with_gpus = f" with {demand.gpus} such GPUs" if demand.gpus else ""
    by_cpu = max(nodes, key=lambda node: node.cpu)
    if demand.cpu > by_cpu.cpu:
        message = (
            f"{demand.cpu:g} CPUs exceed the largest node{with_gpus}, {by_cpu.name} with {by_cpu.cpu:g}; "
            "ask for less"
        )
        return Refusal("exceeds-capacity", message, "cpu")
    by_memory = max(nodes, key=lambda node: node.memory_mb)
    if demand.memory_mb > by_memory.memory_mb:
        message = (
            f"{in_gib(demand.memory_mb, by_memory.memory_mb)} of host memory exceed the largest "
            f"node{with_gpus}, {by_memory.name} with {in_gib(by_memory.memory_mb, demand.memory_mb)}; "
            "ask for less"
        )
        return Refusal("exceeds-capacity", message, "memory_mb")
    if not any(node.cpu >= demand.cpu and node.memory_mb >= demand.memory_mb for node in nodes):
        message = (
            f"no node{with_gpus} has {demand.cpu:g} CPUs and {in_gib(demand.memory_mb)} of host memory "
            "together; ask for less of one"
        )
        return Refusal("exceeds-capacity", message, "memory_mb")
    return None


def check_quota(demand: Demand, need_mb: int, tenant: str, policy: Policy) -> Refusal | None:
    """Return the refusal of a demand that the tenant's quota could never allow; otherwise None. `need_mb` is
    what the demand counts against the quota."""
    maximum_mb = policy.most_mb(tenant)
    if maximum_mb is None or need_mb <= maximum_mb:
        return None
    message = (
        f"the task counts {in_gib(need_mb, maximum_mb)} of GPU memory (on the largest GPUs that it may use), "
        f"and tenant {tenant} may have {in_gib(maximum_mb, need_mb)} at most, guaranteed and borrowed; "
        "ask for less, or for smaller kinds"
    )
    return Refusal("exceeds-quota", message, "gpu_mb" if demand.gpu_mb is not None else "gpus")


def ranks_text(demand: Demand, bundle: Demand) -> str:
    """Return the text that names the ranks with this demand, such as `rank 3`, `ranks 0 to 3` or `4 ranks
    from rank 1 on`."""
    ranks = [rank for rank, other in enumerate(demand.bundles) if other == bundle]
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"{len(ranks)} ranks from rank {ranks[0]} on"
