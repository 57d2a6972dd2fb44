"""What agents tell of their machines becomes findings: real sockets, disks, traffic and clocks."""

import asyncio
import ctypes
import fcntl
import os
import platform
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from gpubroker_server.adapters.ray import peers
from gpubroker_server.adapters.ray.driver.agents import NodeAgents
from gpubroker_server.adapters.ray.driver.reports import ReportReader
from gpubroker_server.adapters.ray.peers import AT_ONCE, Peer, PeerPorts, peers_of
from gpubroker_server.adapters.ray.wire import peers_order, write_reports
from gpubroker_server.core.control.findings.diagnose import FleetKnown, diagnose_fleet
from gpubroker_server.core.control.findings.finding import Finding
from gpubroker_server.core.domain.orders import NodeReport
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import MonotonicSeconds
from gpubroker_server.core.world.world import World

from tests.builders import GIB, NOW, a_node, a_sample, a_task, a_world, holding
from tests.closed_ports import a_closed_port
from tests.contracts.fake_runners import FakeRunners, Leader, a_leader
from tests.mounts import mounted
from tests.nvml.heard import next_node_sample

OpenLeader = Callable[..., Leader]
SPEED_MBIT = 10
IFF_TAP, IFF_NO_PI, TUNSETIFF, SIOCETHTOOL, ETHTOOL_SSET = 0x0002, 0x1000, 0x400454CA, 0x8946, 2
"""From Linux' own headers."""


@pytest.fixture
def open_leader(runners: FakeRunners, tmp_path: Path) -> OpenLeader:
    """Of an agent that samples often."""
    return partial(a_leader, runners, tmp_path, sample_period_seconds=0.05)


def found(world: World, agents: Any = None) -> dict[str, Finding]:
    """By kind."""
    known = FleetKnown({"state": "connected", "agents": agents or {}}, has_leader=True)
    return {one.kind: one for one in diagnose_fleet(world, Policy(), known, NOW)}


async def finding(leader: Leader, world: World, kind: str) -> Finding:
    """From the agent's next samples, as soon as there is one of this kind."""
    while kind not in (known := found(world)):
        sample = await next_node_sample(leader)
        world.measure((), [sample])
    return known[kind]


@pytest.fixture
def closed_port() -> Iterator[int]:
    with a_closed_port() as closed:
        yield int(closed.getsockname()[1])


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A connection to it is never taken: what a firewall that drops packets looks like."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(2):
            waits = stack.enter_context(socket.socket())
            waits.setblocking(False)
            waits.connect_ex(full.getsockname())
        yield int(full.getsockname()[1])


@pytest.mark.provokes("node-unreachable-from-node")
async def test_node_another_node_cannot_reach_is_found_until_it_can(
    open_leader: OpenLeader, closed_port: int, silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "CONNECT_SECONDS", 0.2)
    leader, world = (
        open_leader(),
        a_world(a_node("n1"), a_node("n2"), a_node("n3"), a_node("n4", ready=False)),
    )
    await leader.announce()
    with socket.create_server(("127.0.0.1", 0)) as listens:
        port = int(listens.getsockname()[1])
        others = [
            Peer("n2", "127.0.0.1", (port, closed_port)),
            Peer("n3", "127.0.0.1", (port,)),
            Peer("n4", "127.0.0.1", (closed_port,)),
        ]
        await leader.order(*peers_order(others))
        refused = await finding(leader, world, "node-unreachable-from-node")
        assert (refused.subject, refused.remedy.split(",")[0]) == ("n2", f"nc -vz 127.0.0.1 {closed_port}")
        assert f"n1 cannot connect to 127.0.0.1:{closed_port} of n2" in refused.cause
        assert "Connection refused" in refused.cause

        # It goes on to be tried, at its new ports too, though others have their turn.
        await leader.order(*peers_order([Peer("n2", "127.0.0.1", (port, silent_port))]))
        while "no answer within 0.2 s" not in refused.cause:
            world.node_samples.clear()
            refused = await finding(leader, world, "node-unreachable-from-node")
        await leader.order(*peers_order([Peer("n2", "127.0.0.1", (port,))]))
        while "node-unreachable-from-node" in found(world):
            world.measure((), [await next_node_sample(leader)])


async def test_no_more_than_a_few_unreachable_peers_are_kept(closed_port: int) -> None:
    ports = PeerPorts()
    for turn in range(2):
        ports.try_all(Peer(f"{turn}-{n}", "127.0.0.1", (closed_port,)) for n in range(AT_ONCE))
        ports.try_all([Peer("not while others are tried", "127.0.0.1", (closed_port,))])
        assert ports._trying is not None
        await ports._trying
    assert [node for node, _, _ in ports.unreached] == [f"1-{n}" for n in range(peers.MAX_KEPT)]


def test_each_node_tries_each_other_one_in_its_turn() -> None:
    circle = [Peer(f"n{n}", "h", (1,)) for n in range(20)]
    for at, one in enumerate(circle):
        turns = [peers_of(circle, at, turn) for turn in range(3)]
        assert {len(turn) for turn in turns} == {AT_ONCE}
        assert {peer for turn in turns for peer in turn} == {*circle} - {one}
    assert peers_of(circle[:1], 0, 5) == []
    assert peers_of(circle[:3], 1, 1) == [circle[2], circle[0]]


class Traffic:
    """An interface of 10 Mbit/s, and what is sent over it."""

    def __init__(self, stack: ExitStack) -> None:
        name = f"gpb{os.getpid()}"
        self._tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        stack.callback(os.close, self._tap)
        fcntl.ioctl(self._tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
        subprocess.run(["ip", "link", "set", name, "up"], check=True)
        # Frames without an address: no route of this machine changes.
        self._socket = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
        self._socket.bind((name, 0))
        speed = ctypes.create_string_buffer(struct.pack("IIIHB29x", ETHTOOL_SSET, 0, 0, SPEED_MBIT, 1))
        fcntl.ioctl(self._socket, SIOCETHTOOL, struct.pack("16sP16x", name.encode(), ctypes.addressof(speed)))
        assert psutil.net_if_stats()[name].speed == SPEED_MBIT

    def send(self, frames: int) -> None:
        for _ in range(frames):
            self._socket.send(bytes(1400))
            with suppress(BlockingIOError):
                os.read(self._tap, 2000)


@pytest.mark.evidence
@pytest.mark.provokes("network-bottleneck")
async def test_a_busy_network_beside_waiting_gpus_is_the_bottleneck(open_leader: OpenLeader) -> None:
    """Needs the right to make an interface."""
    leader, world = open_leader(sample_period_seconds=0.2), a_world(holding(a_task("t"), "gpu0", mb=GIB))
    world.measure([a_sample("gpu0", NOW, utilization=0.2)])
    with ExitStack() as stack:
        traffic = Traffic(stack)
        await leader.announce()
        quiet = await next_node_sample(leader)
        assert quiet.network is None or quiet.network < 0.5

        async def keep_busy() -> None:
            while True:
                traffic.send(100)
                await asyncio.sleep(0.02)

        sending = asyncio.create_task(keep_busy())
        one = await finding(leader, world, "network-bottleneck")
        sending.cancel()
    assert (one.subject, one.evidence["gpu_utilization"]) == ("n1", 0.2)
    assert float(one.evidence["network"]) > 0.9


@pytest.mark.evidence
@pytest.mark.provokes("disk-full")
async def test_a_full_disk_of_a_node_is_found(open_leader: OpenLeader, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with mounted(disk, "-t", "tmpfs", "-o", "size=8m", "none"):
        leader, world = open_leader(watched_directories=(str(disk),)), a_world()
        await leader.announce()
        (disk / "filler").write_bytes(bytes(7_800_000))
        one = await finding(leader, world, "disk-full")
        assert (one.subject, one.severity) == (f"n1:{disk}", "warning")
        with pytest.raises(OSError, match="No space"):
            (disk / "rest").write_bytes(bytes(1_000_000))
        while one.severity == "warning":
            world.node_samples.clear()
            one = await finding(leader, world, "disk-full")
        assert one.severity == "critical"


@pytest.mark.provokes("clocks-apart")
@pytest.mark.parametrize(("ahead", "which"), [(40.0, "behind"), (-40.0, "ahead of")])
async def test_a_leader_whose_clock_is_wrong_finds_that_of_its_node_apart(
    open_leader: OpenLeader, ahead: float, which: str
) -> None:
    """`ahead`: how far the leader's clock is."""
    leader, agents = open_leader(), NodeAgents(lambda: MonotonicSeconds(time.monotonic()))
    await leader.announce()
    read_by(agents, lambda: time.time() + ahead, await leader.receive("node_seen"))
    assert f"40 s {which} the leader's" in found(a_world(), agents.views())["clocks-apart"].cause


@pytest.mark.provokes("python-version-differs", "ray-version-differs")
async def test_a_node_with_other_software_than_most_is_found(
    runners: FakeRunners, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = NodeAgents(lambda: MonotonicSeconds(time.monotonic()))
    for node, python, ray in (
        ("n1", "3.12.1", "2.60.0"),
        ("n2", "3.12.9", "2.59.0"),
        ("n3", "3.12.1", "2.60.0"),
    ):
        monkeypatch.setattr(platform, "python_version", lambda told=python: told)
        monkeypatch.setattr("gpubroker_server.adapters.ray.processes.version", lambda _, told=ray: told)
        leader = a_leader(runners, tmp_path / node, node=node)
        await leader.announce()
        read_by(agents, time.time, await leader.receive("node_seen"), node)
    known = found(a_world(), agents.views())
    assert {kind: one.subject for kind, one in known.items()} == {
        "python-version-differs": "n2", "ray-version-differs": "n2",
    }  # fmt: skip


def read_by(agents: NodeAgents, now: Callable[[], float], report: Any, node: str = "n1") -> None:
    """By a leader with this clock."""
    read = ReportReader("test", now).read(write_reports(node, time.time(), [report]), 0.0)
    [seen] = read.reports
    assert isinstance(seen, NodeReport)
    agents.see(seen, read.protocol)
    agents.note_clock(read.node, read.ahead_seconds)
