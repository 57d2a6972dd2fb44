"""The Ray cluster of a run that asks for one: each rank is a node of it, and rank 0 runs the command as its
driver.

Ray is that of the program, not that of the service: its nodes are started by the `ray` that belongs to the
Python of the command.
"""

import contextlib
import hashlib
import json
import os
import random
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from gpubroker.runtime.command import Command
from gpubroker.runtime.messages import RunKey, RunOrder, RunOutcome, failed
from gpubroker.runtime.process import INSTANCE_MARK, RAY_VARIABLE, object_store_mb
from gpubroker.runtime.ray_link import OtherRank, RankZero
from gpubroker.runtime.task import RunningTask

DASHBOARD_VARIABLE = "GPUBROKER_RAY_DASHBOARD"
"""The variable that says that the run's Ray cluster has a dashboard."""
PRIVATE = "private"

TOKENS_SINCE = (2, 52)
"""The first release of Ray with token authentication. Without it, several nodes would be open to anybody."""

START_SECONDS = 300.0
"""The time within which a node of Ray must be up. Busy machines need more than half a minute."""
STARTS = 2
"""The number of times that a node is started. A port that was free may be taken meanwhile."""
POLL_SECONDS = 0.02
LEAVE_SECONDS = 10.0
"""The time that a node gets to take its leave of the cluster, which otherwise misses it only later."""
NOTICE_SECONDS = 60.0
"""The time for which a rank waits for the stop notice after it has lost rank 0. The leader stops all ranks
when one is lost, and its reason says more than this rank knows."""
LOST_SECONDS = 5.0
"""The time between notice and force for a driver that has lost its cluster."""

OBJECT_STORE_MB = 256
"""The size of the object store of a run that asks for no host memory."""
OWN_PROCESSES_MB = 512
"""The host memory that Ray's own processes take on a node, which its workers do not get."""

NO_RESULT = b"null"
"""The result of a rank above 0, as JSON: that of the gang is rank 0's."""

_FAILED = "ray_failed"
_LOOPBACK = "127.0.0.1"
_SHARED_LOOPBACK = "127.0.0.2"
"""The address for several ranks on one machine. `ray start` refuses to join a head on 127.0.0.1."""
_OWN_PORTS = 20_000, 32_000
"""Below the range from which the kernel assigns ports."""
_TEMPORARY = "/tmp"  # noqa: S108  # the paths of sockets are at most 107 bytes long
_PREFIX, _RAY = "gpr-", "r"
"""The names of the directories are short, because the paths of sockets are."""
_TAIL_CHARS = 2000

_ENVIRONMENT: Mapping[str, str] = {
    "RAY_AUTH_MODE": "token",
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise the titles of Ray's processes are written over their environment, and with it the run's mark.
    "SPT_NOENV": "1",
    # On a busy machine a process needs minutes to load its modules.
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_raylet_start_wait_time_s": "120",
}


class RayFailed(Exception):
    """Ray cannot be started for the run; the text says why, and what to do."""

    kind = _FAILED


class RayUnusable(RayFailed):
    """The program's Ray is missing or too old, so that another start would fail too."""

    kind = "ray_unusable"


def has_private_ray(order: RunOrder) -> bool:
    """Return True if the run becomes a Ray cluster, or a node of one."""
    return order.env.get(RAY_VARIABLE) == PRIVATE


def ray_program(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the path of the `ray` that belongs to the command: the one beside its program, as in a virtual
    environment, or else the first on PATH. Raises RayUnusable if there is none."""
    places = environment.get("PATH", os.defpath)
    program = shutil.which(command[0], path=places)
    beside = "" if program is None else os.path.join(os.path.dirname(program), "ray")
    found = beside if os.access(beside, os.X_OK) else shutil.which("ray", path=places)
    if found is None:
        raise RayUnusable(
            f"this run asks for a Ray cluster, and there is no program `ray` beside {command[0]!r} or on "
            "PATH; install Ray into the Python of the command (pip install ray), and name this Python or its "
            "directory in the command"
        )
    return found


def check_version(ray: str) -> None:
    """Check that several nodes of this Ray can have a token. Raises RayUnusable."""
    found = None
    for words in _asking_version(ray):
        answered = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603  # see above
        if found := re.search(r"(\d+)\.(\d+)\S*", answered.stdout):
            break
    if found is None:
        raise RayUnusable(f"`{ray} --version` says no version: {(answered.stderr or answered.stdout)[-500:]}")
    if (int(found[1]), int(found[2])) < TOKENS_SINCE:
        needed = ".".join(map(str, TOKENS_SINCE))
        raise RayUnusable(
            f"Ray {found[0]} of {ray} has no token authentication, so several ranks cannot be its nodes; "
            f"install ray>={needed}, or ask for one node instead of bundles"
        )


def _asking_version(ray: str) -> Iterator[list[str]]:
    """Yield the commands that tell the version. The Python beside `ray` does so without loading Ray, which
    takes seconds on a busy machine."""
    python = os.path.join(os.path.dirname(ray), "python")
    if os.access(python, os.X_OK):
        yield [python, "-c", "import importlib.metadata as m; print(m.version('ray'))"]
    yield [ray, "--version"]


def remove_ray_directories(instance: str, key: RunKey, environment: Mapping[str, str]) -> None:
    """Remove the directories of a run's node of Ray, of which no process is left. `environment` are the
    operator's variables for runs."""
    for left in Path(_above(environment)).glob(f"{_prefix(instance, key)}-*"):
        # A link is another user's: `rmtree` follows none.
        shutil.rmtree(left, ignore_errors=True)


def _above(environment: Mapping[str, str]) -> str:
    return environment.get("RAY_TMPDIR", _TEMPORARY)


def _prefix(instance: str, key: RunKey) -> str:
    return _PREFIX + hashlib.sha256(f"{instance}/{key}".encode()).hexdigest()[:10]


class RayNode:
    """Starts and ends one node of the run's Ray cluster: `ray start --block` and the processes below it."""

    def __init__(self, order: RunOrder, host: str) -> None:
        """`host` is the address at which other nodes reach this one. Raises RayFailed."""
        self._order = order
        self._ray = ray_program(order.command, os.environ)
        if order.barrier:
            check_version(self._ray)
            self.host = _SHARED_LOOPBACK if host.startswith("127.") else host
        else:
            self.host = _LOOPBACK
        self.address = ""
        """The address of the head, once this node is up."""
        self.dashboard = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = Path()
        """A directory of mode 0700. Ray opens the one that it gets to all users."""

    def start(self, head: str, goes_on: Callable[[], bool]) -> bool:
        """Start the node, and return True when it is up. `head` is the address of the head to join; if it is
        empty, this node is the head. Returns False if `goes_on` returns False first. Raises RayFailed."""
        for attempt in range(STARTS):
            self._begin(head)
            assert self._process is not None
            until = time.monotonic() + START_SECONDS
            while self._process.poll() is None and time.monotonic() < until:
                if self._is_up():
                    return True
                if not goes_on():
                    return False
                time.sleep(POLL_SECONDS)
            if attempt + 1 == STARTS or self._process.poll() is None:
                break
        raise RayFailed(f"Ray did not start on this node within {START_SECONDS:g} s or failed: {self.tail()}")

    def environment(self) -> dict[str, str]:
        """Return the environment of the node's processes and of the driver."""
        given = {name: text for name, text in os.environ.items() if name not in _NOT_FOR_NODES}
        if self.host == _LOOPBACK:
            # Otherwise Ray uses the machine's outward address instead.
            given["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        return {**_ENVIRONMENT, **given}

    def end_descriptor(self) -> int:
        """Return a new descriptor that is readable once the node has ended."""
        assert self._process is not None
        return os.pidfd_open(self._process.pid)

    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def leave(self) -> None:
        """End the node so that the cluster knows at once. What is left after LEAVE_SECONDS is killed with the
        process of the run."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_SECONDS)

    def tail(self) -> str:
        """Return the last lines that `ray start` wrote."""
        with contextlib.suppress(OSError):
            return (self._directory / "start.log").read_text(errors="replace")[-_TAIL_CHARS:].strip()
        return "it wrote nothing"

    def _begin(self, head: str) -> None:
        prefix = _prefix(os.environ.get(INSTANCE_MARK, ""), self._order.key)
        try:
            self._directory = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=_above(os.environ)))
            with (self._directory / "start.log").open("wb") as log:
                self._process = subprocess.Popen(  # noqa: S603  # the program of the run's own Ray
                    [self._ray, "start", *self._options(head)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self.environment(),
                    process_group=0,
                )
        except OSError as fault:
            raise RayFailed(f"Ray cannot be started with {self._ray}: {fault}") from None

    def _is_up(self) -> bool:
        # `ray start` writes this file last.
        with contextlib.suppress(OSError):
            self.address = (self._directory / _RAY / "ray_current_cluster").read_text().strip()
        return bool(self.address)

    def _options(self, head: str) -> Iterator[str]:
        """Yield the options of `ray start`: what the run has leased, and ports that nobody else uses."""
        order = self._order
        store_mb = object_store_mb(order.memory_mb) if order.memory_mb else OBJECT_STORE_MB
        yield "--block"
        yield f"--node-ip-address={self.host}"
        yield f"--temp-dir={self._directory / _RAY}"
        yield f"--num-cpus={int(order.cpu or 0)}"
        yield f"--num-gpus={len(order.leases)}"
        yield f"--object-store-memory={store_mb * 2**20}"
        if order.memory_mb:
            yield f"--memory={max(0, order.memory_mb - store_mb - OWN_PROCESSES_MB) * 2**20}"
        if order.custom:
            yield f"--resources={json.dumps(dict(order.custom))}"
        yield from ("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0")
        if head:
            yield f"--address={head}"
            return
        ports = _free_ports(self.host)
        yield from ("--head", "--disable-usage-stats")
        yield f"--port={next(ports)}"
        yield f"--ray-client-server-port={next(ports)}"
        if DASHBOARD_VARIABLE in order.env:
            self.dashboard = f"{_LOOPBACK}:{next(ports)}"
            yield from ("--include-dashboard=true", f"--dashboard-host={_LOOPBACK}")
            yield f"--dashboard-port={self.dashboard.rpartition(':')[2]}"
        else:
            yield "--include-dashboard=false"


_NOT_FOR_NODES = frozenset({"RAY_ADDRESS", "RAY_OVERRIDE_RESOURCES"})
"""The variables for a program that starts a Ray itself."""


def _free_ports(host: str) -> Iterator[int]:
    """Yield ports on which nothing listens now."""
    while True:
        port = random.randrange(*_OWN_PORTS)  # noqa: S311  # no secret
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as asking:
            try:
                asking.bind((host, port))
            except OSError:
                continue
        yield port


class DriverRun:
    """Rank 0: the head of the cluster, and the command as its driver."""

    def __init__(
        self, order: RunOrder, task: RunningTask, node: RayNode, listener: socket.socket | None
    ) -> None:
        """`listener` is the socket at which the other ranks meet; None if there is only this one."""
        self._order = order
        self._task = task
        self._node = node
        self._ranks = None
        if listener is not None:
            self._ranks = RankZero(listener, _token(), lambda: task.workers)
        self._lost = threading.Event()
        """Set if the head has ended before the driver."""
        self._is_over = False

    def run(self) -> RunOutcome:
        """Start the head, run the command, and return its outcome. Raises RayFailed."""
        succeeded = False
        try:
            if not self._node.start("", self._goes_on):
                return RunOutcome("stopped")
            if self._ranks is not None:
                self._ranks.open(self._node.address)
                if not self._ranks.wait_for_nodes(self._goes_on_with_head):
                    return RunOutcome("stopped")
            self._tell()
            outcome = self._run_command()
            succeeded = outcome.ending == "succeeded"
            return outcome
        finally:
            if self._ranks is not None:
                self._ranks.end(succeeded=succeeded)

    def _tell(self) -> None:
        """Write one line about the cluster to the log of the run."""
        nodes, node = len(self._task.members), self._node
        told = f"gpubroker: a Ray cluster of {nodes} node{'s' if nodes > 1 else ''} is up at {node.address}"
        dashboard = f"; its dashboard is http://{node.dashboard} on this node" if node.dashboard else ""
        print(told + dashboard, file=sys.stderr, flush=True)

    def _goes_on(self) -> bool:
        return not self._task.should_stop

    def _goes_on_with_head(self) -> bool:
        if self._node.has_ended():
            raise RayFailed(self._how_lost())
        return not self._task.should_stop

    def _run_command(self) -> RunOutcome:
        environment = {**self._node.environment(), "RAY_ADDRESS": self._node.address}
        command = Command(self._order.command, self._order.key, self._task, environment)
        self._task.call_on_stop(command.stop)
        watch = threading.Thread(target=self._watch_head, args=(command,), name="ray-head", daemon=True)
        watch.start()
        outcome = command.run()
        self._is_over = True
        if self._lost.is_set() and outcome.ending != "succeeded":
            return failed(_FAILED, self._how_lost())
        return outcome

    def _watch_head(self, command: Command) -> None:
        """Wait until the head has ended. If the driver still runs, end it: it has lost its cluster."""
        descriptor = self._node.end_descriptor()
        with contextlib.suppress(OSError), os.fdopen(descriptor):
            ready = select.poll()
            ready.register(descriptor, select.POLLIN)
            ready.poll()
        if not self._is_over:
            self._lost.set()
            command.end(LOST_SECONDS)

    def _how_lost(self) -> str:
        return f"the head of the run's Ray cluster has ended: {self._node.tail()}"


def run_node(order: RunOrder, task: RunningTask, node: RayNode) -> RunOutcome:
    """Run a rank above 0: a node that joins the cluster of rank 0, and ends with it. Raises RayFailed.

    A stop notice to all ranks reaches the driver, which may still need this node to save its work. So the
    rank ends when rank 0 says so, or is gone.
    """
    stopping, stopped = os.pipe()
    task.call_on_stop(lambda: os.close(stopped))

    def goes_on() -> bool:
        return not task.should_stop

    number = task.workers.number
    link = OtherRank.connect(task.rank_zero_address, _token(), order.rank, number, goes_on)
    head = "" if link is None else link.head(goes_on)
    if link is None or (not head and not link.end):
        return RunOutcome("stopped")
    if head:
        if not node.start(head, goes_on):
            return RunOutcome("stopped")
        link.joined()
        _wait_for_end(link, node)
    if link.end == "over":
        return RunOutcome("succeeded", result=NO_RESULT)
    if link.end == "leave":
        node.leave()
        task.wait_for_stop()
        return RunOutcome("stopped")
    with os.fdopen(stopping, "rb", 0) as notice:
        if select.select([notice], [], [], NOTICE_SECONDS)[0]:
            return RunOutcome("stopped")
    why = f"its node of Ray has ended: {node.tail()}" if not link.end else "rank 0 is gone"
    return failed(_FAILED, f"this rank of the run's Ray cluster cannot go on: {why}")


def _wait_for_end(link: OtherRank, node: RayNode) -> None:
    """Wait until rank 0 has told the end, or the node has ended."""
    descriptor = node.end_descriptor()
    with os.fdopen(descriptor):
        ready = select.poll()
        ready.register(descriptor, select.POLLIN)
        ready.register(link, select.POLLIN)
        while not link.end:
            readable = {readable for readable, _ in ready.poll()}
            if link.fileno() in readable:
                link.hear()
            elif descriptor in readable:
                return


def _token() -> str:
    return os.environ["RAY_AUTH_TOKEN"]
