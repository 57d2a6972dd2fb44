"""The Ray head that a broker uses: a local one, which is found again after a restart, or that of a joined
cluster."""

import asyncio
import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec
from gpubroker.runtime.process import is_kept
from msgspec import Struct

from gpubroker_server.adapters.ray.options import RayOptions
from gpubroker_server.adapters.ray.processes import (
    ProcessId,
    boot_id,
    is_alive,
    kill_all,
    process_table,
    send_signal,
    session_of,
)

# The supervisor lives as long as its head, and structlog would take 7 MiB of its memory.
log = logging.getLogger("gpubroker.ray")

START_SECONDS = 180.0
"""The time limit for the start of a head, which takes more than a minute on a busy machine. The start is
given up at once if a vital process ends."""
STOP_SECONDS = 15.0
REACH_SECONDS = 5.0
POLL_SECONDS = 0.02
MAX_SAID_BYTES = 4096

READY = b"1"
"""The byte that the supervisor sends when Ray is up; other bytes are the reason why Ray is not up."""

HEAD_LOST = "the local Ray head lost"
"""The beginning of the supervisor's line in ray-head.log after a vital process of Ray has ended."""

HEAD_ENDED = "the local Ray head ended"

LEAVE_SECONDS = 120.0
"""The time after which a head that has lost a vital process ends, even if its agent still has runs. The
grace period of the runs is shorter."""

LOG = "ray-head.log"

SUPERVISOR = "gpubroker_server.adapters.ray.head.supervisor"


EVERYWHERE: Final = {
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray ends a driver that has not heard from its control service for this time.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
}
"""Environment variables for each process of Ray, and for each process that talks to Ray."""

_PATIENT: Final = {
    # Runs do not use workers that Ray starts ahead; Ray would start one for each CPU.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # On a busy machine a process needs minutes to load its modules.
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_raylet_start_wait_time_s": "120",
}
"""Environment variables for the processes of a Ray that this software starts."""

ON_LOOPBACK: Final = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Environment variables that keep Ray on 127.0.0.1. Without them Ray uses the machine's outward address
instead."""


class HeadRefused(Exception):
    """There is no head to use. The message says why and what to do."""


class HeadNotStarted(HeadRefused):
    """A head was started and did not come up."""


class HeadState(Struct, frozen=True):
    """The contents of `<data_dir>/ray-head.json`. The head's supervisor writes it when it begins and when
    Ray is up."""

    pid: int
    start_ticks: int
    boot_id: str
    address: str
    """The address of Ray; empty until Ray is up."""
    temp_dir: str
    """The directory of Ray's session. Its mode is 0700, whatever modes Ray gives to the files in it."""
    ray: str
    python: str
    dashboard: str = ""
    """The `host:port` of the dashboard, if there is one."""

    @property
    def process(self) -> ProcessId:
        return ProcessId(self.pid, self.start_ticks)

    @property
    def keepalive(self) -> Path:
        """The file that the node agent touches while it has a broker or a run."""
        return Path(self.temp_dir) / "alive"

    @property
    def lost_file(self) -> Path:
        """The file that names a vital process that has ended. When the file appears, the agent stops its
        runs and ends."""
        return lost_file(self.keepalive)

    @property
    def address_file(self) -> Path:
        """The file from which the supervisor reads the addresses of Ray and its dashboard once Ray is up."""
        return Path(self.temp_dir) / "address"

    @property
    def ray_dir(self) -> Path:
        """The directory of Ray, which makes it readable for all users. Its name is short: paths of sockets
        have 107 bytes."""
        return Path(self.temp_dir) / "r"

    def is_running(self) -> bool:
        return self.boot_id == boot_id() and is_alive(self.process)


def lost_file(keepalive: Path) -> Path:
    return keepalive.with_name("lost")


def state_file(data_dir: Path) -> Path:
    return data_dir / "ray-head.json"


def read_state(data_dir: Path) -> HeadState | None:
    try:
        return msgspec.json.decode(state_file(data_dir).read_bytes(), type=HeadState)
    except (OSError, ValueError):
        return None


def write_state(data_dir: Path, state: HeadState) -> None:
    draft = state_file(data_dir).with_suffix(".new")
    draft.write_text(msgspec.json.encode(state).decode())
    draft.replace(state_file(data_dir))


def versions() -> tuple[str, str]:
    return version("ray"), f"{sys.version_info.major}.{sys.version_info.minor}"


async def reach(address: str) -> None:
    """Connect once to the address. Raises HeadRefused if nothing answers there, which Ray itself would
    report only after minutes."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(REACH_SECONDS):
            _reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError) as fault:
        cause = getattr(fault, "strerror", None) or f"no answer within {REACH_SECONDS:g} s"
        raise HeadRefused(
            f"nothing answers at {address}, the configured ray.address: {cause}; start the head of the "
            "cluster there, correct ray.address, or leave it out to have a local Ray started"
        ) from None
    writer.close()


def advice(fault: Exception, options: RayOptions) -> str:
    """Return a message that says why there is no head and what to do."""
    if not isinstance(fault, OSError) or fault.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        return str(fault)
    return (
        f"cannot start Ray: {fault.strerror}: {fault.filename}; give {options.data_dir} and all in it to "
        f"the service's user (uid {os.geteuid()}), or choose another directory with --data-dir"
    )


async def running_head(options: RayOptions, *, chooses_ports: bool = False) -> HeadState:
    """Return the head of this data directory, which is started if none runs. `chooses_ports` is that of
    `NodeToStart`. Raises HeadRefused and OSError."""
    _check_access(options.data_dir)
    async with _head_lock(options.data_dir):
        state = read_state(options.data_dir)
        if state is not None and state.is_running() and state.address:
            _check_versions(state)
            return state
        if state is not None:
            await asyncio.to_thread(_clear_away, options.data_dir, state)
        return await _start(options, chooses_ports)


@asynccontextmanager
async def _head_lock(data_dir: Path) -> AsyncIterator[None]:
    """Hold the lock of the head. The first of several brokers with one data directory starts the head, and
    the others find it."""
    lock = os.open(data_dir / "ray-head.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


async def stop_head(data_dir: Path) -> Sequence[ProcessId]:
    """Stop the head, and kill the processes that are left of it. Returns those that could not be killed.
    Does nothing if no head runs."""
    state = read_state(data_dir)
    if state is None:
        return ()
    send_signal(state.process, signal.SIGTERM)
    for _ in range(int(STOP_SECONDS / POLL_SECONDS)):
        if not state.is_running():
            break
        await asyncio.sleep(POLL_SECONDS)
    return await asyncio.to_thread(_clear_away, data_dir, state)


def why_ended(data_dir: Path) -> str:
    """Return the supervisor's line about the reason why its head has ended, or HEAD_ENDED if there is
    none."""
    with contextlib.suppress(OSError):
        for line in reversed((data_dir / LOG).read_text(errors="replace").splitlines()):
            if line.startswith(HEAD_LOST):
                return line
    return HEAD_ENDED


def ray_environment(options: RayOptions) -> dict[str, str]:
    """Return the environment variables for every process that talks to Ray. The credentials for a joined
    cluster come from the settings, or else from this process's own environment."""
    environment = dict(EVERYWHERE)
    if options.is_local:
        environment |= token_environment(options.data_dir) | {
            # Otherwise Ray's workers end together with their raylet, and the runs in them can save nothing.
            "RAY_raylet_death_check_interval_milliseconds": str(int(1000 * LEAVE_SECONDS)),
        }
        return environment
    if _is_on_loopback_alone(str(options.address)):
        environment |= ON_LOOPBACK
    if options.token_file is not None:
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(options.token_file)}
    if options.tls is not None:
        environment |= {
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": str(options.tls.certificate),
            "RAY_TLS_SERVER_KEY": str(options.tls.key),
            "RAY_TLS_CA_CERT": str(options.tls.ca),
        }
    return environment


def token_environment(data_dir: Path) -> dict[str, str]:
    """Return the environment variables for the processes of a Ray that this software starts. Its token is in
    the data directory."""
    return {
        **EVERYWHERE,
        **ON_LOOPBACK,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file(data_dir)),
        # Otherwise Ray lowers the CPU priority of all its workers, also the node agent; runs lower their own.
        "RAY_worker_niceness": "0",
        **_PATIENT,
    }


def _is_on_loopback_alone(address: str) -> bool:
    """Return True if the head has a loopback address and cannot be reached at this machine's outward
    address, which Ray would use instead."""
    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost"):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, socket.socket() as trying:
        try:
            asking.connect(("192.0.2.1", 1))  # this sends nothing, but selects the outward address
            trying.settimeout(REACH_SECONDS)
            trying.connect((asking.getsockname()[0], int(port)))
        except OSError:
            return True
    return False


def token_file(data_dir: Path) -> Path:
    """Return the file with the token of this data directory. It has mode 0600, and is made by the first
    call."""
    path = data_dir / "ray-token"
    if not path.exists():
        draft = path.with_suffix(".new")
        draft.touch(mode=0o600)
        draft.write_text(secrets.token_hex(32))
        draft.replace(path)
    return path


def _check_access(data_dir: Path) -> None:
    """Check that the node agent and Ray's processes can use this directory. Raises PermissionError."""
    runs = data_dir / "runs"
    runs.mkdir(mode=0o700, exist_ok=True)
    for path, wanted in ((runs, os.W_OK | os.X_OK), (token_file(data_dir), os.R_OK)):
        if not os.access(path, wanted):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


async def _start(options: RayOptions, chooses_ports: bool) -> HeadState:
    log_file = options.data_dir / LOG
    answer = await asyncio.to_thread(_run_supervisor, options, log_file, chooses_ports)
    state = read_state(options.data_dir)
    if answer == READY and state is not None:
        return state
    if state is not None:
        await asyncio.to_thread(_clear_away, options.data_dir, state)
    if answer not in (b"", READY):
        raise HeadNotStarted(answer.decode())
    tail = log_file.read_text(errors="replace")[-1000:]
    raise HeadNotStarted(
        f"the local Ray head did not start within {START_SECONDS:g} s or failed; the service tries again. "
        f"Repair what {log_file} says, or join a running cluster with ray.address. The log ends:\n{tail}"
    )


def _run_supervisor(options: RayOptions, log_file: Path, chooses_ports: bool) -> bytes:
    """Start the supervisor in the background, and return its answer; empty if it does not answer in time."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", 0) as ready, os.fdopen(writing, "wb", 0) as supervisor_end:
        orders = {
            "data_dir": str(options.data_dir),
            "object_store_bytes": options.object_store_mb * 2**20,
            "idle_stop_seconds": options.idle_stop_seconds,
            "dashboard": options.dashboard,
            "chooses_ports": chooses_ports,
        }
        with log_file.open("wb") as output:
            subprocess.run(  # noqa: S603  # our own module
                [sys.executable, "-m", SUPERVISOR, json.dumps(orders), str(writing)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=inherited(options.inherit_env) | ray_environment(options),
                pass_fds=(writing,),
                check=False,
            )
        supervisor_end.close()
        answered, _, _ = select.select([ready], [], [], START_SECONDS)
        return ready.read(MAX_SAID_BYTES) if answered else b""


def inherited(more: Collection[str] = ()) -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if is_kept(name, more)}


def _check_versions(state: HeadState) -> None:
    if (state.ray, state.python) != versions():
        ray, python = versions()
        raise HeadRefused(
            f"a Ray {state.ray} head (Python {state.python}) of this data directory still runs as process "
            f"{state.pid}, and this service has Ray {ray} (Python {python}); let its runs finish, then stop "
            "it with `gpubroker down`"
        )


def _clear_away(data_dir: Path, state: HeadState) -> Sequence[ProcessId]:
    """Kill the processes that are left of a head, and remove its directory. Returns the processes that are
    left after STOP_SECONDS; if there are any, the state file stays, so that they are found again."""
    deadline = time.monotonic() + STOP_SECONDS
    left: list[ProcessId] = []
    while (left := _processes_of(state)) and time.monotonic() < deadline:
        log.warning("killing what a Ray head left behind: %d processes", len(left))
        kill_all(left)
        time.sleep(POLL_SECONDS)
    if not left:
        shutil.rmtree(state.temp_dir, ignore_errors=True)
        state_file(data_dir).unlink(missing_ok=True)
    return left


def _processes_of(state: HeadState) -> list[ProcessId]:
    """Return the processes of the head. They have a session of their own, which no other process joins."""
    if state.boot_id != boot_id():
        return []
    return [
        entry.id
        for pid, entry in process_table().items()
        if session_of(pid) == state.pid and entry.id.start_ticks >= state.start_ticks
    ]
