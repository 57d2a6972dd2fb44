"""The server processes of benchmarks: the service with its own data directory, and the bare FastAPI app."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
from msgspec import Struct

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 90.0
STOP_SECONDS = 60.0

SQLITE_DURABILITY = "SQLite, journal_mode=WAL, synchronous=FULL"

T = TypeVar("T")


class NotReady(RuntimeError):
    """A server was not ready or not stopped in time; the text ends with the last lines of its log."""


class Refused(OSError):
    """The service answered with an error; the text contains the answer."""


class Service(Struct, frozen=True):
    """A running service and its admin token."""

    process: psutil.Popen
    port: int
    token: str
    data_dir: Path

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}

    def ask(self, method: str, path: str, body: Any = None, *, prefer: str = "") -> Any:
        """Return the JSON of the answer. Raises Refused for 4xx and 5xx."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={**self.headers, "Prefer": prefer} if prefer else self.headers,
        )
        try:
            with urllib.request.urlopen(request, timeout=90) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            raise Refused(f"{method} {path}: {error.code} {error.read().decode()}") from None

    def wait_until(self, task: str, state: str) -> None:
        """Wait until the task has this state. Raises NotReady if it does not reach the state in time."""
        deadline = time.monotonic() + START_SECONDS
        while (seen := self.ask("GET", f"/tasks/{task}"))["state"] != state:
            if time.monotonic() > deadline:
                raise NotReady(f"task {task} should be {state} by now: {json.dumps(seen)}")
            time.sleep(0.02)

    def wait_for_leader(self) -> None:
        """Wait until there is a leader and this gateway knows the devices. Raises NotReady if that takes too
        long."""
        deadline = time.monotonic() + START_SECONDS
        while not (self.ask("GET", "/stats")["leader"]["holder"] and self.ask("GET", "/gpus")["items"]):
            if time.monotonic() > deadline:
                raise NotReady(f"the gateway on port {self.port} sees no leader or no devices")
            time.sleep(0.05)


@contextmanager
def service(**settings: str) -> Iterator[Service]:
    """Run `gpubroker serve` with these settings (environment names without GPUBROKER_) and yield it once it
    is ready.

    Afterwards everything that it started is stopped, including its local Ray, and its data directory is
    removed.
    """
    with tempfile.TemporaryDirectory(prefix="gpb-bench-") as folder, served(Path(folder), **settings) as it:
        yield it


@contextmanager
def served(
    data_dir: Path, command: str = "serve", module: str = "gpubroker_server", **settings: str
) -> Iterator[Service]:
    """Run `gpubroker serve` or `gpubroker gateway` with this data directory, which is kept."""
    with _process(command, data_dir, {"PORT": "0", **settings}, module) as process:
        running = _wait_until_ready(process, data_dir)
        try:
            yield running
        finally:
            running.ask("POST", "/shutdown", {"stop_cluster": True})
            process.wait(STOP_SECONDS)


@contextmanager
def brokering(data_dir: Path, **settings: str) -> Iterator[psutil.Popen]:
    """Run `gpubroker broker` with this data directory. Its local Ray keeps running afterwards."""
    with _process("broker", data_dir, settings) as process:
        yield process


@contextmanager
def _process(
    command: str, data_dir: Path, settings: Mapping[str, str], module: str = "gpubroker_server"
) -> Iterator[psutil.Popen]:
    data_dir.mkdir(exist_ok=True)
    given = {"DATA_DIR": str(data_dir), "LOG_LEVEL": "WARNING", **settings}
    environment = {**os.environ, **{f"GPUBROKER_{name}": value for name, value in given.items()}}
    with started([sys.executable, "-m", module, command], environment, _log_in(data_dir)) as process:
        yield process


def _log_in(data_dir: Path) -> Path:
    return data_dir / "bench.log"


@contextmanager
def bare_app() -> Iterator[int]:
    """Run the baseline, a FastAPI app under the service's server settings, and yield its port."""
    with tempfile.TemporaryDirectory(prefix="gpb-bare-") as folder:
        log = Path(folder) / "bare.log"
        with started([sys.executable, "-m", "bench.bare_app"], dict(os.environ), log) as process:
            yield int(wait_for(log.read_text, process, log))


def wait_until_idle(process: psutil.Process, *, busy: float = 0.2, patience_seconds: float = 10.0) -> None:
    """Wait until a process uses less than `busy` of one core, so that it does not disturb the next round."""
    deadline = time.monotonic() + patience_seconds
    process.cpu_percent()
    while time.monotonic() < deadline:
        time.sleep(0.25)
        if process.cpu_percent() < 100 * busy:
            return


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path = ROOT
) -> Iterator[psutil.Popen]:
    with log.open("wb") as out:
        process = psutil.Popen(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
            if psutil.wait_procs([process], STOP_SECONDS)[1]:
                process.kill()


def _wait_until_ready(process: psutil.Popen, data_dir: Path) -> Service:
    def ready() -> Service:
        """Return the service if it answers. The file may still be that of an earlier process, which does not
        answer."""
        known = json.loads((data_dir / "client.json").read_text())
        running = Service(process, int(known["url"].rpartition(":")[2]), known["token"], data_dir)
        running.ask("GET", "/readyz")
        return running

    return wait_for(ready, process, _log_in(data_dir))


def wait_for(question: Callable[[], T], process: psutil.Popen, log: Path) -> T:
    """Ask until there is an answer, and return it. Raises NotReady if the process has ended or the time is
    up."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            if answer := question():
                return answer
        time.sleep(0.05)
    tail = "\n".join(log.read_text().splitlines()[-20:])
    raise NotReady(f"{' '.join(process.args)} is not ready; the last lines of its log:\n{tail}")
