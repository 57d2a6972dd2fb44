"""Each way in which a node is lost, on real Ray with a token: found within the bounds of the settings, its
bytes in quarantine, its runs elsewhere without a retry. And how soon a node that joins is of use."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pytest
from gpubroker import Task
from gpubroker_server.adapters.ray.head.head import HeadState, running_head, stop_head

from tests.e2e.hands import Hands
from tests.e2e.lab.conftest import a_home
from tests.e2e.ray_lab import guest_environment, lab_options, vital_pid
from tests.e2e.ray_node import RayNode
from tests.e2e.service_process import GIB, ServiceProcess, until

BEATS_SECONDS = 8.0
"""Three missed heartbeats of 2 s, found within 8 s, as the page about silent nodes says."""
ORPHANED_SECONDS = BEATS_SECONDS + 5.0
"""Without its raylet an agent lives, and reports, for up to five seconds more."""
RAY_SECONDS = 15.0
"""Ray's own health checks, as set below: five, of up to two seconds each."""
HEAD_SECONDS = 12
"""After that long without their control service, Ray's nodes end themselves (60 by default)."""
RAYS = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(HEAD_SECONDS),
    "RAY_worker_niceness": "0",
}
JOIN_SECONDS = 2.0
JOINS = 5
LOSSES, RUNS = 6, 25


class Site:
    """A service that has joined a head of its own, and the node n2."""

    def __init__(self, stack: ExitStack, home: Path, folder: Path) -> None:
        self.head: HeadState = asyncio.run(running_head(lab_options(home, inherit_env=tuple(RAYS))))
        stack.callback(lambda: asyncio.run(stop_head(home)))
        env = guest_environment(home)
        self.node = stack.enter_context(RayNode(self.head.address, "n2", env | RAYS))
        settings: dict[str, Any] = {
            "ray": {
                "address": self.head.address,
                "cluster": "lost",
                "spares": 1,
                "warm_runners": 1,
                "cpu": 8,
            },
            "simulated_devices": [{"kind": "sim-24g", "memory_mb": 24 * GIB}],
        }
        self.service = stack.enter_context(ServiceProcess(folder / "data", env, **settings))
        self.broker = self.service.broker
        self.hands = Hands(self.broker, folder)
        until(lambda: self.is_of_use() and len(self.broker.nodes()) == 2, "two nodes are of use")

    def is_ready(self) -> bool:
        return any(node.ready for node in self.broker.nodes() if node.name == "n2")

    def is_of_use(self) -> bool:
        free = [gpu for gpu in self.broker.gpus() if gpu.node == "n2" and gpu.free_mb and not gpu.stale]
        return self.is_ready() and bool(free)

    def requeued_after(self, run: Task, since: float) -> float | None:
        """Seconds; None if it was not yet."""
        told = [event for event in self.broker.events(run) if event.kind == "task.requeued"]
        return told[-1].at.timestamp() - since if told else None

    def all_run(self, runs: Iterable[Task]) -> bool:
        return all(self.broker.get(run).state == "running" for run in runs)

    def all_requeued(self, runs: Iterable[Task], since: float) -> bool:
        return all(self.requeued_after(run, since) for run in runs)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name, value in RAYS.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as stack:
        home = stack.enter_context(a_home())
        yield Site(stack, home, tmp_path)


Strike = Callable[[Site], None]


def leaves(site: Site) -> None:
    site.node.strike(signal.SIGTERM, "raylet")


def loses_its_raylet(site: Site) -> None:
    site.node.strike(signal.SIGKILL, "raylet")


def hangs_in_its_raylet(site: Site) -> None:
    site.node.strike(signal.SIGSTOP, "raylet")


def hangs_in_its_agent(site: Site) -> None:
    site.node.strike(signal.SIGSTOP, "ray::NodeAgent")


def hangs(site: Site) -> None:
    site.node.freeze()


def loses_power(site: Site) -> None:
    site.node.kill()


WAYS: list[tuple[Strike, float]] = [
    (leaves, 3.0),
    (loses_its_raylet, ORPHANED_SECONDS),
    (hangs_in_its_raylet, RAY_SECONDS),
    (hangs_in_its_agent, BEATS_SECONDS),
    (hangs, BEATS_SECONDS),
    (loses_power, BEATS_SECONDS),
]


@pytest.mark.evidence
@pytest.mark.parametrize(("strike", "bound_seconds"), WAYS, ids=[way.__name__ for way, _ in WAYS])
def test_lost_node_is_found_in_time_and_its_run_moves_without_a_retry(
    site: Site, strike: Strike, bound_seconds: float
) -> None:
    broker = site.broker
    run = site.hands.at_work("run", gpu_mb=4096, prefer_nodes={"node": ["n2"]})
    assert (run.node, run.max_retries) == ("n2", 0)
    struck_at, began = time.time(), time.monotonic()
    strike(site)
    until(lambda: not site.is_ready(), "it is found")
    found_seconds = time.monotonic() - began
    until(lambda: site.requeued_after(run, struck_at) is not None, "its run is requeued")
    requeued = site.requeued_after(run, struck_at)
    print(f"{strike.__name__}: found after {found_seconds:.1f} s, requeued after {requeued:.1f} s")
    kept = [(one.id, one.node) for one in broker.quarantine().items]
    until(lambda: broker.get(run).state == "running", "it runs elsewhere")
    again = broker.get(run)
    assert (again.node != "n2", again.attempt, again.failures, again.preemptions) == (True, 2, 0, 0)
    assert kept == [(run.id, "n2")], "nobody has seen its process end"
    if site.node.is_there:
        site.node.kill()
    site.node.start()
    until(site.is_of_use, "it is back")
    until(lambda: broker.quarantine().items == (), "its new agent has proven it gone")
    site.hands.end(run)
    assert found_seconds <= bound_seconds


@pytest.mark.evidence
def test_a_driver_that_hangs_is_replaced_and_no_node_is_given_up(site: Site) -> None:
    run = site.hands.at_work("run", gpu_mb=4096, prefer_nodes={"node": ["n2"]})
    driver = site.service.driver()
    driver.suspend()
    until(lambda: not driver.is_running(), "it is replaced")
    assert site.broker.result(site.broker.submit("tests.e2e.work:add", 1, 2)) == 3
    assert site.broker.get(run).attempt == 1
    site.hands.end(run)


@pytest.mark.evidence
def test_person_confirms_the_loss_of_all_nodes_that_ray_has_ended(
    site: Site,
) -> None:
    """Ray ends them for lack of its control service."""
    run = site.hands.at_work("run", gpu_mb=4096, prefer_nodes={"node": ["n2"]})
    control = vital_pid(site.head, "gcs_server")
    assert control is not None
    struck_at, began = time.time(), time.monotonic()
    os.kill(control, signal.SIGKILL)
    until(lambda: site.broker.stats().detection.state == "paused", "no node is heard")
    print(f"gcs_server killed: no node was heard any more after {time.monotonic() - began:.1f} s")
    assert site.broker.get(run).state == "running", "the leader may be cut off"
    site.broker.resume("its Ray is gone")
    until(lambda: site.requeued_after(run, struck_at) is not None, "its run is requeued")
    lost = site.broker.get(run)
    assert (lost.state, lost.attempt, lost.failures) == ("pending", 1, 0)
    assert [one.id for one in site.broker.quarantine().items] == [run.id]


@pytest.mark.evidence
def test_a_node_that_joins_is_of_use_within_two_seconds_as_a_rule(site: Site) -> None:
    took = []
    for _ in range(JOINS):
        site.node.lose()
        until(lambda: not site.is_ready(), "it has left")
        site.node.start()
        joined = time.monotonic()
        until(site.is_of_use, "its GPU is free")
        took.append(time.monotonic() - joined)
    print(f"{JOINS} joins: of use after {median(took):.2f} s, at most {max(took):.2f} s")
    assert median(took) <= JOIN_SECONDS


@pytest.mark.evidence
@pytest.mark.timeout(1200)
def test_what_ran_on_a_node_without_power_is_requeued_within_the_bound(site: Site) -> None:
    took: list[float] = []
    small = {"cpu": 0.05, "prefer_nodes": {"node": ["n2"]}}
    for loss in range(LOSSES):
        runs = [site.hands.hold(f"run-{loss}-{n}", **small) for n in range(RUNS)]
        until(partial(site.all_run, runs), "all run")
        there = [run for run in runs if site.broker.get(run).node == "n2"]
        struck_at = time.time()
        site.node.kill()
        until(
            partial(site.all_requeued, there, struck_at),
            "all come back",
        )
        took += [site.requeued_after(run, struck_at) or 0.0 for run in there]
        site.node.start()
        until(site.is_of_use, "it is back")
        site.hands.end(*runs)
    p50, p99 = median(took), quantiles(took, n=100)[98]
    print(f"{LOSSES} losses with {len(took)} runs: requeued after {p50:.1f} s (p50), {p99:.1f} s (p99)")
    assert p99 <= BEATS_SECONDS
