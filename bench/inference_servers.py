"""The servers that `bench proxy` and `bench inferences` need, and Triton's own load generator."""

import json
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench.load import Measured
from bench.processes import ROOT, started, wait_for
from tests.triton.analyzer import HANGS_WITH_16_CLIENTS, Hangs, analyzed, analyzer_libraries
from tests.triton.server import Triton, free_ports

MLSERVER = ROOT / ".tools" / "mlserver"

_ECHO = """
from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput


class Echo(MLModel):
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        [given] = payload.inputs
        output = ResponseOutput(name="OUTPUT0", shape=given.shape, datatype=given.datatype, data=given.data)
        return InferenceResponse(model_name=self.name, outputs=[output])
"""


@contextmanager
def triton(models: Sequence[str]) -> Iterator[Triton]:
    """Yield a real Triton, as `make triton` installs it, with these models of `tests/triton/models`
    loaded."""
    with tempfile.TemporaryDirectory(prefix="gpb-triton-") as folder, Triton(Path(folder), models) as running:
        yield running


class PerfAnalyzer:
    """Triton's load generator for gRPC, in C++, since one in Python would be slower than what it measures."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libraries = analyzer_libraries(folder / "libraries")
        self._runs = 0
        self._hangs = Hangs(HANGS_WITH_16_CLIENTS)

    def measure(
        self, port: int, model: str, floats: int, *, clients: int, requests: int, token: str = ""
    ) -> Measured:
        """Send the requests and return the measurement. Raises RuntimeError if any request was refused."""
        self._runs += 1
        options = [
            "-i", "grpc", "-u", f"127.0.0.1:{port}", "-m", model, "--shape", f"INPUT0:1,{floats}",
            "--concurrency-range", str(clients), "--request-count", str(requests),
        ]  # fmt: skip
        if token:
            options += ["-H", f"authorization: Bearer {token}"]
        asked = analyzed(self._libraries, self._folder / f"run-{self._runs}.json", self._hangs, *options)
        spans = [(one["timestamp"], one["response_timestamps"][-1]) for one in asked]
        seconds = (max(end for _, end in spans) - min(begin for begin, _ in spans)) / 1e9
        return Measured(seconds, {"200": len(spans)}, [(end - begin) / 1e6 for begin, end in spans])


@contextmanager
def perf_analyzer() -> Iterator[PerfAnalyzer]:
    with tempfile.TemporaryDirectory(prefix="gpb-analyzer-") as folder:
        yield PerfAnalyzer(Path(folder))


@contextmanager
def mlserver(model: str) -> Iterator[tuple[int, psutil.Popen]]:
    """Yield (HTTP port, process) of an MLServer whose model returns its input; it speaks Triton's protocol.

    MLServer does in one process what the service and Triton do in two, which is to its advantage. Raises
    SystemExit if it is not installed.
    """
    if not (MLSERVER / "bin" / "mlserver").exists():
        sys.exit("MLServer is not installed; run `make mlserver`")
    http_port, grpc_port, metrics_port = free_ports(3)
    settings = {
        "host": "127.0.0.1",
        "http_port": http_port,
        "grpc_port": grpc_port,
        "metrics_port": metrics_port,
        "parallel_workers": 0,
        "debug": False,
        "logging_settings": {"version": 1, "root": {"level": "WARNING"}},
    }
    with tempfile.TemporaryDirectory(prefix="gpb-mlserver-") as name:
        folder, log = Path(name), Path(name) / "mlserver.log"
        (folder / "settings.json").write_text(json.dumps(settings))
        (folder / "echo").mkdir()
        (folder / "echo" / "echo_model.py").write_text(_ECHO)
        implementation = {"name": model, "implementation": "echo_model.Echo"}
        (folder / "echo" / "model-settings.json").write_text(json.dumps(implementation))

        def is_ready() -> bool:
            url = f"http://127.0.0.1:{http_port}/v2/models/{model}/ready"
            with urllib.request.urlopen(url, timeout=1) as answer:
                return bool(answer.status == 200)

        command = [str(MLSERVER / "bin" / "mlserver"), "start", str(folder)]
        path = {"PATH": f"{MLSERVER / 'bin'}:/usr/bin:/bin", "HOME": str(folder)}
        with started(command, path, log, folder) as process:
            wait_for(is_ready, process, log)
            yield http_port, process
