"""The server that these tests are made with may be killed and started again; the service lives through it."""

import psutil
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.e2e.service_process import ServiceProcess, until
from tests.triton.server import Triton


def test_a_server_that_was_killed_and_comes_again_is_asked_again(
    triton: Triton, service: ServiceProcess
) -> None:
    headers = {"Authorization": f"Bearer {service.token}"}
    with tritonclient.http.InferenceServerClient(service.url.removeprefix("http://")) as client:
        assert client.is_model_ready("identity_fp32", headers=dict(headers))
        stubs = psutil.Process(triton.pid).children()
        assert len(stubs) > 1
        triton.kill()
        try:
            until(lambda: not any(stub.is_running() for stub in stubs), "its models' processes have gone")
            with pytest.raises(InferenceServerException, match="cannot be reached and was sent nothing"):
                client.get_model_metadata("identity_fp32", headers=dict(headers))
            [server] = service.broker.stats().model_servers
            assert server.http.fault, "all else is answered, and says so"
        finally:
            triton.start()
        assert client.is_model_ready("identity_fp32", headers=dict(headers))
