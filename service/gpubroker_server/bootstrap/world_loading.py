"""From what a database holds to a World."""

from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import Snapshot


def fill_anew(world: World, snapshot: Snapshot) -> None:
    """Bring a World that has missed events to where the database stands.

    Samples are measured anew; whoever remembers the inventory by its version sees that it may have changed.
    """
    fresh = World(world.accounts.half_life_seconds)
    fill(fresh, snapshot)
    fresh.inventory_version += world.inventory_version
    vars(world).update(vars(fresh))


def fill(world: World, snapshot: Snapshot) -> None:
    """Bring an empty World to where the database stands."""
    for node in snapshot.nodes:
        world.add_node(node)
    for device in snapshot.devices:
        world.add_device(device)
    for task in snapshot.tasks:
        world.add_task(task)
    for lease in snapshot.leases:
        world.add_lease(lease)
    for usage in snapshot.usage:
        world.accounts.restore(usage)
    for pledge in snapshot.pledges:
        world.add_pledge(pledge)
    for request in snapshot.requests:
        world.add_request(request)
    world.finished.update(snapshot.finished)
    for topic, sketch in snapshot.estimates:
        world.learned.put(topic, sketch)
    world.position = snapshot.position
    world.as_of = snapshot.at
