"""The server that these tests are made with: it answers, and leaves nothing behind."""

from pathlib import Path

import psutil
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.e2e.service_process import until
from tests.triton.server import Triton


def test_a_killed_server_takes_the_processes_of_its_models_with_it_and_can_be_started_again(
    tmp_path: Path,
) -> None:
    with Triton(tmp_path / "triton", loaded=["identity_fp32"]) as triton:
        stubs = psutil.Process(triton.pid).children()
        assert len(stubs) == 1
        triton.kill()
        until(lambda: not any(stub.is_running() for stub in stubs), "the stub has gone")
        triton.start()
        client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{triton.http_port}")
        assert client.is_model_ready("identity_fp32")
        with pytest.raises(InferenceServerException, match="out of memory"):
            client.load_model("fails_at_load")
        client.close()
    assert not psutil.pid_exists(triton.pid)
