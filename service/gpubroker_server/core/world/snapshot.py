"""The World as it stands at one moment, for a plan that is worked out while the World goes on."""

from collections import Counter

from gpubroker_server.core.world.demand_mix import Mix
from gpubroker_server.core.world.queue import PendingQueue
from gpubroker_server.core.world.world import World


def still_of(world: World) -> World:
    """Nodes, devices, runs, pledges, and how the tenants stand. Shares nothing with the World that changes,
    so that another thread may read it. Of who waits it knows only the tenants; it can explain nobody."""
    twin = World(world.accounts.half_life_seconds)
    twin.position, twin.as_of = world.position, world.as_of
    twin.inventory_version = world.inventory_version
    twin.nodes, twin.tasks = dict(world.nodes), dict(world.tasks)
    twin.active, twin.custom_use = world.active.copy(), dict(world.custom_use)
    twin.by_node = {node: list(keys) for node, keys in world.by_node.items()}
    twin.books = {key: book.copy() for key, book in world.books.items()}
    twin.use = {node: use.copy() for node, use in world.use.items()}
    twin.runs = {node: set(names) for node, names in world.runs.items()}
    twin.leases = {claim: dict(leases) for claim, leases in world.leases.items()}
    twin.pledges = {task: dict(pledges) for task, pledges in world.pledges.items()}
    twin.queue = PendingQueue(dict(world.awaited.inheritance.priorities))
    twin.queue.tenants = Counter(world.queue.tenants)
    twin.learned.sketches = dict(world.learned.sketches)
    twin.mix = Mix(world.mix.edition)
    twin.accounts = world.accounts.copy()
    return twin
