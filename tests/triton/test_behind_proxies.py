"""The proxies of deploy/proxy in front of a live service: TLS, answers in pieces, and Triton's gRPC."""

import queue
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest
from msgspec import Struct
from tritonclient.grpc import service_pb2_grpc

from tests.bootstrap.test_health import health
from tests.deploy.proxies import caddy, nginx
from tests.e2e.service_process import ServiceProcess
from tests.patience import PATIENCE_SECONDS
from tests.triton.server import free_ports
from tests.triton.test_calls import request
from tests.triton.test_tls import Authority

PROXIES = {"nginx": nginx, "caddy": caddy}


class Front(Struct, frozen=True):
    url: str
    grpc_port: int
    root: Path
    token: str

    def client(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.url,
            verify=ssl.create_default_context(cafile=str(self.root)),
            headers={"Authorization": f"Bearer {self.token}"},
            timeout=PATIENCE_SECONDS / 2,
        )

    def channel(self) -> grpc.Channel:
        credentials = grpc.ssl_channel_credentials(self.root.read_bytes())
        return grpc.secure_channel(f"localhost:{self.grpc_port}", credentials)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),)


@pytest.fixture(scope="module", params=PROXIES)
def front(
    request: pytest.FixtureRequest,
    service: ServiceProcess,
    call_port: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("front")
    authority = Authority(folder / "lab")
    certificate, key = authority.signed("front")
    https, for_grpc = free_ports(2)
    ports = {
        "service": urlsplit(service.url).port or 0,
        "calls": call_port,
        "https": https,
        "grpc": for_grpc,
    }
    with PROXIES[request.param](folder / "files", ports, certificate, key) as url:
        yield Front(url, for_grpc, authority.root, service.token)


def test_a_client_submits_and_waits_through_it(front: Front) -> None:
    body = {"run": {"entrypoint": "tests.e2e.work:add", "kwargs": {"seconds": 0.01}}}
    with front.client() as client:
        accepted = client.post("/tasks", json=body)
        assert accepted.status_code == 202
        ended = client.get(f"{accepted.headers['location']}/wait", params={"timeout_seconds": 60})
    assert ended.json()["state"] == "succeeded"


def test_a_gateway_that_cannot_be_reached_is_passed_over(front: Front) -> None:
    with front.client() as client:
        assert {client.get("/readyz").status_code for _ in range(10)} == {200}
        body = {"run": {"entrypoint": "tests.e2e.work:add", "kwargs": {"seconds": 0.01}}}
        assert {client.post("/tasks", json=body).status_code for _ in range(10)} == {202}


def test_its_health_is_asked_through_tls_and_on_the_port_of_its_own(
    front: Front, service: ServiceProcess
) -> None:
    trusting = health("--url", front.url, SSL_CERT_FILE=str(front.root))
    assert trusting == (0, f"gpubroker: {front.url} answers")
    code, line = health("--url", front.url)
    assert code == 1
    assert "certificate" in line
    own = health("--data-dir", str(service.data_dir))
    assert own == (0, f"gpubroker: {service.url} answers")


def test_without_a_token_nothing_is_told(front: Front) -> None:
    with front.client() as client:
        assert client.get("/tasks", headers={"Authorization": ""}).status_code == 401


def test_a_large_body_is_judged_by_the_service(front: Front) -> None:
    with front.client() as client:
        answer = client.post("/tasks", content=b" " * (9 << 20))
    assert answer.status_code == 413
    assert answer.headers["content-type"] == "application/problem+json"


def test_the_first_piece_of_an_answer_passes_long_before_the_last(front: Front) -> None:
    slow = {"text_input": "a", "N": 2, "DELAY_MS": int(PATIENCE_SECONDS * 1000)}
    path = "/v2/models/stream_n/generate_stream"
    with front.client() as client, client.stream("POST", path, json=slow) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert next(answer.iter_lines()).startswith("data:")


def test_each_answer_of_a_grpc_stream_comes_before_the_next_is_asked_for(front: Front) -> None:
    asked: queue.Queue[Any] = queue.Queue()
    with front.channel() as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter(asked.get, None), metadata=front.metadata, timeout=PATIENCE_SECONDS)
        for number in range(3):
            asked.put(request(b"%d" % number, 1, number=str(number)))
            assert next(call).infer_response.id == str(number)
        asked.put(None)
        assert list(call) == []


def test_a_call_without_a_token_is_refused_in_grpcs_words(front: Front) -> None:
    with front.channel() as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter([request(b"a", 1)]), timeout=PATIENCE_SECONDS)
        with pytest.raises(grpc.RpcError) as refused:
            list(call)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
