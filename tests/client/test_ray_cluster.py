"""Runs that become Ray clusters, with a stand-in for the program `ray`."""

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from gpubroker.runtime.journal import Journal
from gpubroker.runtime.messages import RunKey, RunOrder, RunOutcome
from gpubroker.runtime.ray_cluster import (
    DriverRun,
    RayFailed,
    RayNode,
    ray_program,
    remove_ray_directories,
    run_node,
)
from gpubroker.runtime.task import RunningTask

from tests.client import stand_in_ray
from tests.e2e.service_process import until

TOKEN = "f" * 64


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("GPUBROKER_INSTANCE", "here")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    return tmp_path


class Rank:
    """One rank of a run, in a thread of this process."""

    def __init__(self, folder: Path, *words: str, ranks: int = 1, rank: int = 0, **changes: Any) -> None:
        program = str(folder / "bin" / "program")
        terms: dict[str, Any] = {"cpu": 2.0, "env": {"GPUBROKER_RAY": "private"}, **changes}
        self.order = RunOrder(
            "t", 1, "command", rank, command=(program, *words), world_size=ranks, barrier=ranks > 1, **terms
        )
        self.task = RunningTask(self.order, Journal(lambda _: None))
        self.outcome: RunOutcome | None = None
        self._thread = threading.Thread(target=self._run)
        self.listener: socket.socket | None = None

    def start(self, listener: socket.socket | None = None) -> "Rank":
        self.listener = listener
        self._thread.start()
        return self

    def end(self) -> RunOutcome:
        self._thread.join(30)
        assert self.outcome is not None
        return self.outcome

    def _run(self) -> None:
        try:
            node = RayNode(self.order, "127.0.0.1")
            if self.order.rank:
                self.outcome = run_node(self.order, self.task, node)
            else:
                self.outcome = DriverRun(self.order, self.task, node, self.listener).run()
        except RayFailed as fault:
            self.outcome = RunOutcome("failed", str(fault).encode())


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture(autouse=True)
def ended_nodes(folder: Path) -> Iterator[None]:
    """The process of a run is killed with all below it; here the nodes are."""
    yield
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if stand_in_ray.__name__ in child.cmdline():
                child.kill()


def nodes(folder: Path) -> int:
    return len(list(folder.glob("node-*")))


def a_cluster(folder: Path, listener: socket.socket, *words: str, ranks: int = 2) -> list[Rank]:
    stand_in_ray.install(folder / "bin")
    address = "127.0.0.1:{1}".format(*listener.getsockname())
    members = [Rank(folder, *words, ranks=ranks, rank=rank) for rank in range(ranks)]
    for member in members:
        member.task.go(address)
    return [members[0].start(listener), *(member.start() for member in members[1:])]


def test_node_has_exactly_what_its_run_leases(folder: Path) -> None:
    stand_in_ray.install(folder / "bin")
    leases = (("GPU-a", 10), ("GPU-b", 10))
    rank = Rank(folder, leases=leases, memory_mb=4096, custom=(("fpga", 2.0),))
    assert rank.start().end() == RunOutcome("succeeded", b'{"exit_code":0}')
    [options] = stand_in_ray.started(folder)
    assert (options["--num-cpus"], options["--num-gpus"]) == ("2", "2")
    assert int(options["--object-store-memory"]) == 1228 * 2**20
    assert int(options["--memory"]) == (4096 - 1228 - 512) * 2**20
    assert json.loads(options["--resources"]) == {"fpga": 2.0}
    assert (options["--node-ip-address"], options["--include-dashboard"]) == ("127.0.0.1", "false")
    assert (options["RAY_AUTH_MODE"], options["RAY_ADDRESS"]) == ("token", "")
    [directory] = folder.glob("gpr-*")
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (folder / "driver").read_text().endswith(f"127.0.0.1:{options['--port']}")


def test_dashboard_listens_on_loopback_if_it_is_asked_for(folder: Path) -> None:
    stand_in_ray.install(folder / "bin")
    env = {"GPUBROKER_RAY": "private", "GPUBROKER_RAY_DASHBOARD": "1"}
    Rank(folder, env=env).start().end()
    [options] = stand_in_ray.started(folder)
    assert (options["--include-dashboard"], options["--dashboard-host"]) == ("true", "127.0.0.1")


def test_failure_of_the_driver_is_that_of_the_run(folder: Path) -> None:
    stand_in_ray.install(folder / "bin")
    outcome = Rank(folder, "fails").start().end()
    assert outcome.fault is not None
    assert (outcome.ending, outcome.fault.kind) == ("failed", "exit_code")


def test_ray_that_fails_once_is_started_again(folder: Path) -> None:
    stand_in_ray.install(folder / "bin", behaviour="fails once")
    assert Rank(folder).start().end().ending == "succeeded"
    assert len(stand_in_ray.started(folder)) == 2


def test_ray_that_fails_ends_the_run_with_its_last_lines(folder: Path) -> None:
    stand_in_ray.install(folder / "bin", behaviour="fails")
    outcome = Rank(folder).start().end()
    assert outcome.ending == "failed"
    assert b"no port is free" in (outcome.result or b"")


def test_driver_that_loses_its_head_is_ended(folder: Path) -> None:
    stand_in_ray.install(folder / "bin")
    rank = Rank(folder, "stays").start()
    until(lambda: (folder / "driver").exists(), "the driver runs")
    [node] = folder.glob("node-*")
    os.kill(int(node.name.removeprefix("node-")), signal.SIGTERM)
    node.unlink()
    outcome = rank.end()
    assert outcome.fault is not None
    assert (outcome.ending, outcome.fault.kind) == ("failed", "ray_failed")
    assert "the head of the run's Ray cluster has ended" in outcome.fault.message


def test_notice_reaches_the_driver(folder: Path) -> None:
    stand_in_ray.install(folder / "bin")
    rank = Rank(folder, "stays").start()
    until(lambda: (folder / "driver").exists(), "the driver runs")
    rank.task.give_notice()
    assert rank.end().ending == "stopped"


def test_ranks_are_nodes_that_end_with_the_driver(folder: Path, listener: socket.socket) -> None:
    ranks = a_cluster(folder, listener, ranks=3)
    assert [rank.end().ending for rank in ranks] == ["succeeded"] * 3
    head, *others = stand_in_ray.started(folder)
    assert "--head" in head
    assert {other["--address"] for other in others} == {f"127.0.0.2:{head['--port']}"}


def test_ranks_wait_for_the_notice_after_a_failed_driver(folder: Path, listener: socket.socket) -> None:
    zero, other = a_cluster(folder, listener, "fails")
    assert zero.end().ending == "failed"
    other.task.give_notice()
    assert other.end().ending == "stopped"


def test_rank_keeps_its_node_while_the_driver_saves_its_work(folder: Path, listener: socket.socket) -> None:
    zero, other = a_cluster(folder, listener, "stays")
    until(lambda: (folder / "driver").exists(), "the driver runs")
    other.task.give_notice()
    assert other.outcome is None
    zero.task.give_notice()
    assert (zero.end().ending, other.end().ending) == ("stopped", "stopped")


def test_rank_that_is_told_to_leave_takes_its_node_out(folder: Path, listener: socket.socket) -> None:
    zero, first, second = a_cluster(folder, listener, "stays", ranks=3)
    until(lambda: (folder / "driver").exists(), "the driver runs")
    second.task.give_notice()
    zero.task.resize([0, 1])
    assert second.end().ending == "stopped"
    assert (zero.outcome, first.outcome) == (None, None)
    for rank in (zero, first):
        rank.task.give_notice()
    assert (zero.end().ending, first.end().ending) == ("stopped", "stopped")


def test_rank_that_joins_late_becomes_a_node(folder: Path, listener: socket.socket) -> None:
    zero, first = a_cluster(folder, listener, "stays")
    until(lambda: (folder / "driver").exists(), "the driver runs")
    late = Rank(folder, ranks=3, rank=2)
    late.task.resize([0, 1, 2], 1)
    late.task.go("127.0.0.1:{1}".format(*listener.getsockname()))
    late.start()
    until(lambda: nodes(folder) == 3, "it has joined before rank 0 hears of it")
    zero.task.resize([0, 1, 2], 1)
    zero.task.resize([0, 1], 2)
    late.task.give_notice()
    assert late.end().ending == "stopped"
    for rank in (zero, first):
        rank.task.give_notice()
    assert (zero.end().ending, first.end().ending) == ("stopped", "stopped")


def test_rank_whose_node_ends_fails_with_its_last_lines(folder: Path, listener: socket.socket) -> None:
    zero, other = a_cluster(folder, listener, "stays")
    until(lambda: (folder / "driver").exists(), "the driver runs")
    head, node = sorted(folder.glob("node-*"), key=lambda path: path.stat().st_mtime)
    os.kill(int(node.name.removeprefix("node-")), signal.SIGTERM)
    node.unlink()
    other.task.give_notice()
    assert other.end().ending == "stopped", "the leader stops the ranks of a gang that lost one"
    zero.task.give_notice()
    assert (zero.end().ending, head.exists()) == ("stopped", True)


def test_stop_before_the_cluster_is_complete_ends_all_ranks(folder: Path, listener: socket.socket) -> None:
    stand_in_ray.install(folder / "bin")
    zero = Rank(folder, ranks=2)
    zero.task.go("127.0.0.1:{1}".format(*listener.getsockname()))
    zero.start(listener)
    until(lambda: nodes(folder) == 1, "the head is up")
    zero.task.give_notice()
    assert zero.end().ending == "stopped"
    assert not (folder / "driver").exists()


def test_rank_that_reaches_nobody_ends_by_the_notice(folder: Path) -> None:
    stand_in_ray.install(folder / "bin")
    other = Rank(folder, ranks=2, rank=1)
    other.task.go("127.0.0.1:1")
    other.start()
    other.task.give_notice()
    assert other.end().ending == "stopped"


def test_stranger_without_the_token_hears_nothing(folder: Path, listener: socket.socket) -> None:
    stand_in_ray.install(folder / "bin")
    zero = Rank(folder, ranks=2)
    zero.task.go("")
    zero.start(listener)
    with socket.create_connection(listener.getsockname()) as stranger:
        assert b"question" in stranger.recv(4096)
        stranger.sendall(b'{"rank": 1, "answer": "guessed", "question": "x"}\n')
        assert stranger.recv(4096) == b"", "the connection is closed"
    zero.task.give_notice()
    assert zero.end().ending == "stopped"


@pytest.mark.parametrize(
    ("version", "is_refused"), [("2.51.3", True), ("2.52.0", False), ("3.0.0rc1", False)]
)
def test_several_nodes_need_a_ray_with_tokens(
    folder: Path, listener: socket.socket, version: str, is_refused: bool
) -> None:
    stand_in_ray.install(folder / "bin", version)
    make: Callable[[], RayNode] = lambda: RayNode(Rank(folder, ranks=2).order, "10.0.0.1")  # noqa: E731
    if is_refused:
        with pytest.raises(RayFailed, match=r"Ray 2\.51\.3 .* install ray>=2\.52"):
            make()
    else:
        assert make().host == "10.0.0.1"
    assert RayNode(Rank(folder).order, "10.0.0.1").host == "127.0.0.1", "one node needs no other"


def test_ray_beside_the_program_goes_before_that_on_path(folder: Path) -> None:
    program = stand_in_ray.install(folder / "bin")
    other = stand_in_ray.install(folder / "other").with_name("ray")
    places = {"PATH": str(other.parent)}
    assert ray_program([str(program)], places) == str(program.with_name("ray"))
    assert ray_program(["/bin/true"], places) == str(other)
    with pytest.raises(RayFailed, match="no program `ray` beside 'true' or on PATH"):
        ray_program(["true"], {"PATH": "/nowhere"})


def test_directories_of_a_claim_are_removed_and_no_others(folder: Path) -> None:
    stand_in_ray.install(folder / "bin")
    rank = Rank(folder)
    rank.start().end()
    remove_ray_directories("here", RunKey("t", 2, 0), os.environ)
    assert len(list(folder.glob("gpr-*"))) == 1
    remove_ray_directories("here", rank.order.key, os.environ)
    assert list(folder.glob("gpr-*")) == []
