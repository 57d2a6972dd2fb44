"""The server that these tests are made with may be killed and started again; the service lives through it."""

import psutil
import pytest
import tritonclient.http
from gpubroker import BrokerError, Refused
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


def test_a_model_outside_the_ledger_is_unloaded_and_loaded(triton: Triton, service: ServiceProcess) -> None:
    broker = service.broker
    assert broker.unload_model("line_fp32").state in ("draining", "cold")
    until(lambda: broker.model("line_fp32").state == "cold", "it has left")
    loaded = broker.load_model("line_fp32")
    assert (loaded.state, loaded.node) == ("resident", None)
    broker.unload_model("line_fp32")
    until(lambda: broker.model("line_fp32").state == "cold", "it has left again")
    pinned = broker.pin_model("line_fp32")
    assert pinned.state == "resident"
    assert "stays until it is unloaded" in (pinned.reason or "")
    assert broker.pin_model("line_fp32", pinned=False).state == "resident"
    with pytest.raises(Refused, match="there is no model") as refused:
        broker.load_model("nowhere")
    assert refused.value.code == "not-found"
    with pytest.raises(BrokerError, match="did not load model nowhere: ") as failed:
        broker.load_model("nowhere", server=loaded.server)
    assert failed.value.code == "model-not-loaded"
