"""Whether a set of components fits a fleet."""

from typing import Any

from service.core.draft import Draft
from service.core.fleet import Component, FleetPlan, Machine, Totals, fleet_of, plan_fleet
from service.core.kinds import Kind
from service.core.policy import Policy
from service.core.units import Mib
from service.core.world import World
from tests.builders import GIB, NOW, a_demand, a_device, a_task, a_world, holding

POLICY = Policy()


def planned(world: World, *components: Component) -> FleetPlan:
    return plan_fleet(world, components, "default", POLICY, NOW)


def a_component(name: str, count: int = 1, priority: int = 50, **demand: Any) -> Component:
    return Component(name, count, a_demand(**demand), priority)


def a_machine(name: str = "m1", cpu: float = 16.0, gpus: int = 1) -> Machine:
    return Machine(name, cpu, Mib(64 * GIB), (("H100", Mib(80 * GIB)),) * gpus)


def a_fleet(*machines: Machine) -> World:
    return fleet_of(machines, (), NOW)


def test_each_component_is_told_its_place_and_how_many_have_none():
    plan = planned(a_fleet(a_machine(gpus=2)), a_component("small", 3, gpu_mb=50 * GIB))
    assert (plan.fits, plan.missing) == (False, {"small": 1})
    assert [placed.place.node for placed in plan.placed] == ["m1", "m1"]
    assert len({placed.place.devices for placed in plan.placed}) == 2


def test_what_is_hardest_to_place_is_placed_first():
    world = a_fleet(a_machine(gpus=2))
    plan = planned(world, a_component("small", 1, gpu_mb=GIB), a_component("whole", 2, gpus=1))
    assert plan.missing == {"small": 1}
    plan = planned(world, a_component("small", 2, gpu_mb=30 * GIB), a_component("large", 2, gpu_mb=50 * GIB))
    assert plan.fits


def test_components_of_higher_priority_are_placed_first_so_that_none_displaces_another():
    low, high = a_component("low", 2, 20, gpu_mb=GIB), a_component("high", 1, 80, gpus=1)
    plan = planned(a_fleet(a_machine()), low, high)
    assert ([p.component for p in plan.placed], plan.missing, plan.displaced) == (["high"], {"low": 2}, ())


def test_what_finds_no_room_displaces_runs_of_lower_priority_and_is_put_where_they_were():
    run = holding(a_task("run", priority=10, gpu_mb=80 * GIB), "gpu0")
    world = a_world(a_device(), run)
    plan = planned(world, a_component("new", 2, gpu_mb=40 * GIB))
    assert plan.fits
    assert [placed.displaced for placed in plan.placed] == [("run",), ()]
    assert plan.displaced == (run.task,)
    assert planned(world, a_component("new", 1, 10, gpu_mb=GIB)).missing == {"new": 1}


def test_to_plan_changes_nothing():
    run = holding(a_task("run", priority=10, gpu_mb=80 * GIB), "gpu0")
    world = a_world(a_device(), run)
    planned(world, a_component("new", gpu_mb=40 * GIB))
    assert (world.tasks["run"], Draft(world).book(a_device().key).unheld_mb()) == (run.task, 0)


def test_who_asks_for_no_gpu_displaces_nobody():
    run = holding(a_task("run", priority=10, cpu=64.0), node="n1")
    assert planned(a_world(a_device(), run), a_component("new", cpu=1.0)).missing == {"new": 1}


def test_roles_that_take_turns_are_counted_together_and_apart():
    roles = (a_demand(gpus=1, cpu=2.0), a_demand(gpu_mb=20 * GIB, cpu=1.0, memory_mb=GIB))
    worker = Component("worker", 2, a_demand(gpus=1, cpu=2.0, memory_mb=GIB), 50, roles)
    plan = planned(a_fleet(a_machine(gpus=2)), worker)
    assert plan.fits
    assert plan.totals == Totals(gpus=2, whole_gpus=2, gpu_mb=0, cpu=4.0, memory_mb=2 * GIB)
    assert plan.totals_apart == Totals(4, 2, 40 * GIB, 6.0, 2 * GIB)


def test_a_fleet_that_need_not_exist_has_the_costs_of_the_kinds_that_are_known():
    known = Kind("H100", 9, Mib(GIB))
    world = fleet_of([a_machine()], [known], NOW)
    [book] = world.books.values()
    assert (book.device.power, book.device.context_mb, book.device.physical_mb) == (9, GIB, 80 * GIB)
    assert planned(world, a_component("full", gpu_mb=80 * GIB)).missing == {"full": 1}
    assert planned(world, a_component("rest", gpu_mb=79 * GIB)).fits
