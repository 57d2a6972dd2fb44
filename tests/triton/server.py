"""The real tritonserver, alone on this machine's CPUs: the one of the nvidia-pytriton wheel in .tools/triton.

It has one backend, Python, whose models are those of the folder `models`.
"""

import contextlib
import glob
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".tools" / "triton"
MODELS = Path(__file__).parent / "models"

_ASK = """
import importlib.metadata, json, sys, sysconfig
wheel = importlib.metadata.distribution("nvidia-pytriton")
print(json.dumps({
    "python": "%d.%d" % sys.version_info[:2],
    "libdir": sysconfig.get_config_var("LIBDIR") or "",
    "package": str(wheel.locate_file("pytriton/tritonserver")),
    "libraries": str(wheel.locate_file("nvidia_pytriton.libs")),
}))
"""


class Triton:
    """`with Triton(folder) as triton:` serves a copy of our models, `loaded` ones from the start."""

    def __init__(
        self,
        folder: Path,
        loaded: Sequence[str] = (),
        options: Sequence[str] = (),
        mode: str = "explicit",
    ) -> None:
        """`mode`: of model control; with `none` it loads all it can."""
        self._folder = folder
        self._mode = mode
        self._loaded = loaded
        self._options = options
        self._log = folder / "tritonserver.log"
        self._shared_memory = f"gpb{uuid.uuid4().hex[:8]}_"
        self._process: subprocess.Popen[bytes] | None = None
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        folder.mkdir(parents=True, exist_ok=True)
        self.repository = folder / "models"
        shutil.copytree(MODELS, self.repository)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> "Triton":
        self.start()
        return self

    def __exit__(self, *_exit: object) -> None:
        self.kill()

    def start(self) -> None:
        """Also again, after `kill`, on the same ports."""
        parts = wheel()
        self._prepare_backend(parts)
        path = f"{HOME / 'bin'}:{os.environ.get('PATH', '')}"
        libraries = f"{parts['libraries']}:{parts['libdir']}"
        env = {**os.environ, "PATH": path, "LD_LIBRARY_PATH": libraries}
        env["PYTHONDONTWRITEBYTECODE"] = "1"  # or a model's folder has changed when it is loaded again
        for name in ("PYTHONHOME", "VIRTUAL_ENV"):
            env.pop(name, None)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-IS", "-c", _DIES_WITH_PARENT, *self._command(parts)],
                env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._is_ready():
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)

    def kill(self) -> None:
        """With the processes of its models, which share its group; what it left of shared memory goes too."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(PATIENCE_SECONDS)
        for left in glob.glob(f"/dev/shm/{self._shared_memory}*"):
            with contextlib.suppress(OSError):
                os.unlink(left)

    def pause(self) -> None:
        """It takes connections and bytes, and answers nothing."""
        os.killpg(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def slow_to_load(self, seconds: float) -> Iterator[None]:
        """The model `slow`, for a while."""
        with self._slow_configured('"0"', f'"{round(1000 * seconds)}"'):
            yield

    @contextlib.contextmanager
    def kept_loading(self) -> Iterator[Path]:
        """The model `slow`, until there is a file at this path."""
        awaited = self._folder / "end-of-load"
        with self._slow_configured('""', f'"{awaited}"'):
            try:
                yield awaited
            finally:
                awaited.touch()

    @contextlib.contextmanager
    def _slow_configured(self, default: str, chosen: str) -> Iterator[None]:
        config = self.repository / "slow" / "config.pbtxt"
        before = config.read_text(encoding="utf-8")
        config.write_text(
            before.replace(f"string_value: {default}", f"string_value: {chosen}"), encoding="utf-8"
        )
        try:
            yield
        finally:
            config.write_text(before, encoding="utf-8")

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _command(self, parts: dict[str, str]) -> list[str]:
        return [
            f"{parts['package']}/bin/tritonserver",
            f"--model-repository={self.repository}",
            f"--model-control-mode={self._mode}",
            "--strict-readiness=false",  # one failed load would make the whole server not ready
            "--disable-auto-complete-config",  # or each load starts a second process first
            f"--backend-directory={self._folder / 'backends'}",
            f"--backend-config=python,shm-region-prefix-name={self._shared_memory}",
            *("--http-address=127.0.0.1", f"--http-port={self.http_port}"),
            *("--grpc-address=127.0.0.1", f"--grpc-port={self.grpc_port}"),
            *("--metrics-address=127.0.0.1", f"--metrics-port={self.metrics_port}"),
            "--allow-gpu-metrics=false",
            *(f"--load-model={name}" for name in self._loaded),
            *self._options,
        ]

    def _prepare_backend(self, parts: dict[str, str]) -> None:
        """A directory of its own: the wheel keeps the stubs, one for each Python, apart."""
        backend = self._folder / "backends" / "python"
        if backend.exists():
            return
        backend.mkdir(parents=True)
        package = Path(parts["package"])
        for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
            shutil.copy(package / "backends" / "python" / name, backend)
        stub = backend / "triton_python_backend_stub"
        shutil.copy(package / "python_backend_stubs" / parts["python"] / stub.name, stub)
        stub.chmod(0o755)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v2/health/ready", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def wheel() -> dict[str, str]:
    """Where its parts are."""
    python = HOME / "bin" / "python"
    assert python.exists(), "there is no Triton for the tests; `make triton` installs it"
    asked = subprocess.run([python, "-c", _ASK], check=True, capture_output=True, text=True)
    found: dict[str, str] = json.loads(asked.stdout)
    return found


_DIES_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
)
"""When the tests are killed, so is the server; its models' processes follow within seconds. Asked for between
fork and exec, where gRPC has handlers of its own, it would now and then cost the server its life."""


def free_ports(count: int) -> list[int]:
    """It takes no 0 for a free one."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
