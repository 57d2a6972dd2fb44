"""A bench with real Ray below it, and what its machine shows of that."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from gpubroker.runtime.process import RUN_MARK
from gpubroker_server.adapters.ray.agent.node_agent import DESERTED_SECONDS
from gpubroker_server.adapters.ray.driver.executor import RayExecutor
from gpubroker_server.adapters.ray.head.head import EVERYWHERE, ON_LOOPBACK, HeadState, read_state
from gpubroker_server.adapters.ray.options import RayOptions
from gpubroker_server.core.domain.orders import ReportedDevice
from gpubroker_server.core.domain.units import Instant, Mib
from msgspec.structs import replace

from tests.contracts.executor_bench import PATIENCE_SECONDS, Bench


class SystemClock:
    def now(self) -> Instant:
        return Instant(time.time())


PROCESS_MB = Mib(500)
"""The host memory that each process of a run may take whose task states none."""


def lab_options(data_dir: Path, **changes: Any) -> RayOptions:
    """Two simulated GPUs, small limits, and no pause worth mentioning."""
    devices = tuple(ReportedDevice(f"GPU-sim-{i}", "simulated", i, Mib(24_000), True) for i in range(2))
    options = RayOptions(
        data_dir=data_dir,
        devices=devices,
        sample_period_seconds=0.5,
        beat_seconds=0.5,
        process_memory_mb=PROCESS_MB,
        result_limit_bytes=2_000_000,
        checkpoint_limit_bytes=1_000_000,
        object_store_mb=Mib(80),
    )
    return replace(options, **changes)


SLEEP_SECONDS = DESERTED_SECONDS / 3


class Lab(Bench):
    """A bench whose executor is on real Ray."""

    def __init__(self, options: RayOptions) -> None:
        super().__init__(RayExecutor(options, SystemClock()))
        self.options = options
        self.slept_since = time.monotonic()

    async def wake(self) -> None:
        """What it has not heard yet may be older than an agent's patience with who does not listen."""
        if time.monotonic() - self.slept_since > SLEEP_SECONDS:
            await self.announce_again()

    @property
    def head(self) -> HeadState:
        """Of a lab that has a local one, which runs."""
        state = read_state(self.options.data_dir)
        assert state is not None
        return state


def guest_environment(data_dir: Path) -> dict[str, str]:
    """Return the variables with which a process joins the head of this data directory."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(data_dir / "ray-token"),
        **EVERYWHERE,
        **ON_LOOPBACK,
        # A joined cluster's runs have their directory below the temporary one.
        "TMPDIR": str(data_dir),
    }


async def eventually(true: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> Any:
    """For what nobody reports: looks again and again, with a deadline."""
    async with asyncio.timeout(seconds):
        while not (answer := true()):  # noqa: ASYNC110  # processes and files send no events
            await asyncio.sleep(0.02)
    return answer


def is_there(pid: int) -> bool:
    """A process that has ended is not there, though it may wait to be buried (Z) or be dead (X)."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/status").read_text().partition("State:\t")[2][:1] not in "ZX"
    return False


def vital_pid(head: HeadState | None, name: str) -> int | None:
    """Of a head that may still be starting; read from /proc, whose names appear with the program."""
    if head is None:
        return None
    for process in psutil.process_iter(["name"]):
        try:
            if process.info["name"] == name and os.getsid(process.pid) == head.pid and is_there(process.pid):
                return process.pid
        except ProcessLookupError:
            continue
    return None


def command_lines(word: str) -> dict[int, str]:
    """Processes with this word in their command line."""
    found = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if word in line and is_there(pid):
                found[pid] = line
    return found


def agents_of(head: HeadState) -> list[int]:
    """The processes of our node agents in one cluster."""
    return [pid for pid in command_lines("ray::NodeAgent") if os.getsid(pid) == head.pid]


def marked_with(text: str) -> Sequence[int]:
    """Processes whose environment carries this run mark."""
    wanted = f"{RUN_MARK}={text}".encode()
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def slow_agents(folder: Path, seconds: float) -> str:
    """A PYTHONPATH on which the agents of a Ray node take so long to load, as on a busy machine."""
    (folder / "slow").mkdir()
    (folder / "slow" / "sitecustomize.py").write_text(
        "import sys, time\n"
        "if any('/agent.py' in word or '/runtime_env/agent/' in word for word in sys.orig_argv):\n"
        f"    time.sleep({seconds})\n"
    )
    return str(folder / "slow")
