"""A gpubroker service of its own for the demo, which leaves no process and no file behind."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from gpubroker import Broker, BrokerError

CONFIG = Path(__file__).with_name("config.yaml")
ROOT = Path(__file__).resolve().parents[2]

_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
_PR_SET_CHILD_SUBREAPER = 36


class ServiceFailed(Exception):
    """The service did not start, or left a process behind; the text has the end of its log."""


@contextmanager
def running_service() -> Iterator[Broker]:
    """Start a service, and stop it at the end of the block; none of its processes outlives the block.

    Raises ServiceFailed if the service does not start, or leaves processes behind.
    """
    adopt_orphans()
    data_dir = Path(tempfile.mkdtemp(prefix="gpubroker-demo-"))
    log = data_dir / "service.log"
    child = _start(data_dir, log)
    try:
        with _connected(child, data_dir, log) as broker:
            try:
                yield broker
            finally:
                broker.shutdown(stop_cluster=True)
                left = _left_after(_STOP_SECONDS)
            if left:
                raise ServiceFailed(f"still running after the shutdown: {', '.join(left)}\n{_tail(log)}")
    finally:
        _end_all()
        shutil.rmtree(data_dir, ignore_errors=True)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that none is lost (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _start(data_dir: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start the service in its own session: Ctrl-C only reaches the demo, which then shuts the service
    down."""
    gpubroker = Path(sys.executable).with_name("gpubroker")
    with log.open("wb") as output:
        return subprocess.Popen(
            [gpubroker, "serve", "--config", CONFIG, "--data-dir", data_dir],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not name.startswith("GPUBROKER_")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextmanager
def _connected(child: subprocess.Popen[bytes], data_dir: Path, log: Path) -> Iterator[Broker]:
    written = data_dir / "client.json"
    give_up_at = time.monotonic() + _START_SECONDS
    while not written.exists():
        if child.poll() is not None:
            raise ServiceFailed(f"`gpubroker serve` ended with code {child.returncode}\n{_tail(log)}")
        if time.monotonic() > give_up_at:
            raise ServiceFailed(f"no service after {_START_SECONDS:.0f} s\n{_tail(log)}")
        time.sleep(0.05)
    found = json.loads(written.read_text())
    with Broker(found["url"], found["token"], retry_seconds=_START_SECONDS) as broker:
        try:
            broker.ready()
        except BrokerError as error:
            raise ServiceFailed(f"{error}\n{_tail(log)}") from error
        yield broker


def _left_after(seconds: float) -> list[str]:
    """Return the descendants that are still alive after `seconds`, as `pid name`."""
    give_up_at = time.monotonic() + seconds
    while (alive := _alive()) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    return [f"{process.pid} {process.name()}" for process in alive if process.is_running()]


def _end_all() -> None:
    """Terminate, then kill, all descendants that the shutdown left behind."""
    for sign, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        for process in _alive():
            try:
                process.send_signal(sign)
            except psutil.NoSuchProcess:
                continue
        if not _left_after(seconds):
            return


def _alive() -> list[psutil.Process]:
    """Return the descendants that have not ended."""
    descendants = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(descendants, timeout=0)
    return list(alive)


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-40:] if log.exists() else []
    return "\n".join(["the end of its log:", *lines]) if lines else "it wrote no log"
