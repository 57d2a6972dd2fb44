"""MLServer with a model that gives back what it gets: another server of Triton's protocol, as people run it.

It does in one process what the service and Triton do in two, which is to its advantage.
"""

import json
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench.processes import ROOT, started, wait_for
from tests.triton.server import free_ports

HOME = ROOT / ".tools" / "mlserver"

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
def mlserver(model: str) -> Iterator[tuple[int, psutil.Popen]]:
    """(its port for HTTP, its process), when the model is ready. Raises SystemExit if it is not installed."""
    if not (HOME / "bin" / "mlserver").exists():
        sys.exit("there is no MLServer; `make mlserver` installs it")
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

        command = [str(HOME / "bin" / "mlserver"), "start", str(folder)]
        path = {"PATH": f"{HOME / 'bin'}:/usr/bin:/bin", "HOME": str(folder)}
        with started(command, path, log, folder) as process:
            wait_for(is_ready, process, log)
            yield http_port, process
