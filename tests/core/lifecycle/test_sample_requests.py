"""Nodes measure their devices at once when memory was released there that must be seen free."""

from gpubroker_server.core.domain.model_orders import ModelState
from gpubroker_server.core.domain.units import MonotonicSeconds
from gpubroker_server.core.lifecycle.quarantine import AGAIN_SECONDS, SampleRequests
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import a_sample
from tests.core.served import ask, at, index, loaded


class Asked:
    """By one leader, with a clock that the test sets."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seconds = 1000.0
        self._requests = SampleRequests()

    def after(self, seconds: float) -> list[str]:
        self.seconds += seconds
        return list(self._requests.due(self.world, MonotonicSeconds(self.seconds)))


def unloaded(seconds: float) -> World:
    world = loaded()
    ask(world, "cancel", seconds - 1.0)
    index(world, {"llm": ModelState.ABSENT}, seconds)
    return world


def measure(world: World, seconds: float) -> None:
    world.measure([a_sample(device, at(seconds)) for device in world.ledgers])


def test_a_node_is_asked_when_a_model_has_left_until_it_has_measured() -> None:
    asked = Asked(unloaded(10.0))
    assert asked.after(0.0) == ["n1"]
    assert asked.after(AGAIN_SECONDS / 2) == []
    measure(asked.world, 10.1)
    assert asked.after(AGAIN_SECONDS) == []


def test_sample_that_is_slightly_too_old_is_requested_again_after_a_pause() -> None:
    """The second request follows after twice the usual time."""
    asked = Asked(unloaded(10.0))
    assert asked.after(0.0) == ["n1"]
    measure(asked.world, 9.999)
    assert asked.after(AGAIN_SECONDS) == ["n1"]
    assert asked.after(0.9 * AGAIN_SECONDS) == []
    assert asked.after(0.2 * AGAIN_SECONDS) == ["n1"]


def test_devices_that_are_gone_or_hold_measured_memory_need_no_sample() -> None:
    world = loaded()
    assert Asked(world).after(0.0) == []
    ask(world, "cancel", 9.0)
    [ledger] = world.ledgers.values()
    world.add_device(replace(ledger.device, present=False, version=2))
    index(world, {"llm": ModelState.ABSENT}, 10.0)
    assert world.ledgers == {}
    assert Asked(world).after(0.0) == []
