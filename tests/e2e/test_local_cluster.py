"""`gpubroker cluster`: several nodes on this machine, each with GPUs of its own, and nothing left of them."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from gpubroker import Broker
from gpubroker_server.adapters.ray.cluster.local_cluster import cluster_folder
from gpubroker_server.adapters.ray.head.head import HeadState, read_state

from examples import elastic
from tests.e2e.ray_lab import is_there, slow_agents
from tests.e2e.service_process import ServiceProcess, environment, until
from tests.patience import PATIENCE_SECONDS

RAYS_OWN_PORTS = {6379, 8265, 10001, 52365}


def command(home: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "gpubroker_server", "cluster", *words, "--data-dir", str(home)]


def run(home: Path, *words: str) -> tuple[int, str]:
    """Exit code and everything that it printed."""
    ended = subprocess.run(
        command(home, *words), env=environment(), capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    return ended.returncode, ended.stdout + ended.stderr


class Cluster:
    """`gpubroker cluster start` in a terminal."""

    def __init__(
        self, home: Path, *words: str, name: str = "local", env: Mapping[str, str] | None = None
    ) -> None:
        self.home = home
        self.folder = cluster_folder(home, name)
        self.told: list[str] = []
        self.process = subprocess.Popen(
            command(home, "start", "--name", name, *words),
            env=environment(**(env or {})),
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reading = threading.Thread(target=self._read)
        self._reading.start()
        until(lambda: "Ctrl-C ends the cluster" in self.told or not self._reading.is_alive(), "it is up")
        state = read_state(self.folder)
        assert state is not None, self.told
        self.state: HeadState = state

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.told.extend(line.rstrip() for line in self.process.stderr)

    def processes(self) -> list[int]:
        """Everything in the session of its supervisor."""
        found = []
        for pid in psutil.pids():
            try:
                if os.getsid(pid) == self.state.pid and is_there(pid):
                    found.append(pid)
            except ProcessLookupError:
                continue
        return found

    def end(self, number: signal.Signals) -> None:
        """Signal the command, as Ctrl-C does, and wait until it has ended."""
        self.process.send_signal(number)
        self.process.wait(PATIENCE_SECONDS)
        self._reading.join(PATIENCE_SECONDS)

    def nothing_is_left(self) -> bool:
        return not self.processes() and not Path(self.state.temp_dir).exists()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    started = Cluster(tmp_path, "--workers", "1", "--simulated", "3x24GiB")
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.end(signal.SIGTERM)


def test_a_node_whose_agents_load_slowly_is_started_again_until_it_is_up(tmp_path: Path) -> None:
    env = {"PYTHONPATH": slow_agents(tmp_path, 25.0)}
    started = Cluster(tmp_path / "data", "--simulated", "1x24GiB", env=env)
    try:
        assert started.told[0].startswith("head runs: GPU 0")
        log = (started.folder / "ray-head.log").read_text()
        assert "node head did not start; trying again in 5 s" in log
        assert "the local Ray head lost raylet while it started (Ray says: " in log
    finally:
        started.end(signal.SIGTERM)
    assert started.nothing_is_left()


def listening_ports(cluster: Cluster) -> list[tuple[str, int]]:
    ours = set(cluster.processes())
    return [
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for connection in list[Any](psutil.net_connections("inet"))
        if connection.status == psutil.CONN_LISTEN and connection.pid in ours
    ]


def test_workers_take_the_next_gpus_until_none_is_left_and_leave_nothing(cluster: Cluster) -> None:
    assert cluster.told[:2] == [
        f"head runs: GPU 0, 1 CPU, 1 worker_unit, at {cluster.state.address}",
        "worker-1 runs: GPU 1, 1 CPU, 1 worker_unit",
    ]
    code, said = run(cluster.home, "start", "--simulated", "1x1GiB")
    assert code == 2
    assert f"cluster local runs already at {cluster.state.address}" in said
    assert run(cluster.home, "add-worker") == (0, "worker-2 runs: GPU 2, 1 CPU, 1 worker_unit\n")
    code, said = run(cluster.home, "add-worker")
    assert code == 2
    assert "no GPU is left for worker-3: the head and 2 workers have 1 each" in said
    assert "--simulated 4x24576MiB" in said
    code, said = run(cluster.home, "status", "--output", "json")
    assert [(node["node"], node["gpus"]) for node in json.loads(said)["nodes"]] == [
        ("head", [0]), ("worker-1", [1]), ("worker-2", [2]),
    ]  # fmt: skip

    ports = listening_ports(cluster)
    assert {address for address, _ in ports} == {"127.0.0.1"}
    assert {port for _, port in ports}.isdisjoint(RAYS_OWN_PORTS)
    cluster.end(signal.SIGINT)
    assert cluster.process.returncode == 0
    assert cluster.told[-1] == "cluster local ended"
    assert cluster.nothing_is_left()
    assert list(cluster.home.iterdir()) == [cluster.home / "clusters"]
    assert list((cluster.home / "clusters").iterdir()) == []
    code, said = run(cluster.home, "status")
    assert code == 2
    assert "no cluster local of " in said
    assert "start one with `gpubroker cluster start`" in said


@pytest.mark.evidence
@pytest.mark.parametrize("killed", ["command", "supervisor", "raylet of worker-1", "gcs_server"])
def test_whatever_is_killed_the_rest_goes_on_or_nothing_is_left(cluster: Cluster, killed: str) -> None:
    named = {psutil.Process(pid).name(): pid for pid in reversed(cluster.processes())}
    match killed:
        case "command":
            cluster.end(signal.SIGKILL)
        case "supervisor":
            os.kill(cluster.state.pid, signal.SIGKILL)
            assert cluster.process.wait(PATIENCE_SECONDS) == 1
        case "gcs_server":
            os.kill(named["gcs_server"], signal.SIGKILL)
            assert cluster.process.wait(PATIENCE_SECONDS) == 1
            cluster._reading.join(PATIENCE_SECONDS)
            assert any("gcs_server of the head has ended" in line for line in cluster.told)
        case _:
            raylets = [pid for pid in cluster.processes() if psutil.Process(pid).name() == "raylet"]
            os.kill(max(raylets, key=lambda pid: psutil.Process(pid).create_time()), signal.SIGKILL)
            until(lambda: "worker-1" not in run(cluster.home, "status")[1], "it is noticed")
            assert run(cluster.home, "add-worker")[1].startswith("worker-1 runs: GPU 1")
            assert run(cluster.home, "stop")[0] == 0
    until(cluster.nothing_is_left, "nothing is left")
    again = Cluster(cluster.home, "--simulated", "1x1GiB")
    again.end(signal.SIGINT)
    assert again.nothing_is_left()


@pytest.mark.evidence
def test_two_clusters_run_side_by_side_and_a_taken_port_is_refused(cluster: Cluster) -> None:
    other = Cluster(cluster.home, "--simulated", "1x1GiB", name="other")
    try:
        assert not set(listening_ports(cluster)) & set(listening_ports(other))
        port = cluster.state.address.rpartition(":")[2]
        code, said = run(cluster.home, "start", "--name", "third", "--port", port, "--simulated", "1x1GiB")
        assert code == 2
        assert re.search(f"cannot listen on 127.0.0.1:{port}: .* gcs_server\\)", said)
        code, said = run(cluster.home, "add-worker", "--name", "third")
        assert (code, "running are local, other (--name)" in said) == (2, True)
    finally:
        other.end(signal.SIGINT)
    assert other.nothing_is_left()
    assert cluster.processes()


@pytest.mark.evidence
def test_the_elastic_example_takes_each_worker_as_it_arrives(
    cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ray = {"address": cluster.state.address, "token_file": str(cluster.folder / "ray-token"), "spares": 1}
    settings: dict[str, Any] = {"ray": ray, "simulated_devices": [], "entrypoints": ["examples.elastic:*"]}
    with ServiceProcess(tmp_path / "data", **settings) as service:
        until(lambda: len(service.broker.gpus()) == 2, "both nodes say which GPU they have")
        assert {gpu.node for gpu in service.broker.gpus()} == {"head", "worker-1"}
        assert {node.cpu.total for node in service.broker.nodes()} == {1.0}
        broker = Broker(service.url, service.token)
        fitted = threading.Thread(target=elastic.run, args=(broker,))
        fitted.start()
        until(lambda: run(cluster.home, "add-worker")[0] == 0, "a worker is added")
        fitted.join(PATIENCE_SECONDS)
        assert not fitted.is_alive()
        [task] = broker.list()
        assert (task.state, task.attempt) == ("succeeded", 1)
        assert task.ranks is not None
    assert {rank.node for rank in task.ranks} == {"head", "worker-1", "worker-2"}
    told = capfd.readouterr().out
    print(told)
    assert re.search(r"step \d+ by rank 0, 1: y = ", told)
    assert re.search(r"step \d+ by rank 0, 1, 2: y = ", told)
    assert "rank 2 has joined" in told
