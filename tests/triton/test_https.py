"""A real Triton behind nginx, which speaks TLS, and lets in who shows a certificate and a token."""

import socket
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any

import pytest
from msgspec import Struct

from tests.authority import Authority
from tests.chaos.forked import ForkedService
from tests.deploy.proxies import nginx_by
from tests.e2e.service_process import GIB, until
from tests.triton.raw import through
from tests.triton.server import Triton, free_ports
from tests.triton.test_residency import call, infer, ready, state_of

MODEL = "identity_fp32"
TOKEN = "s3cret"  # of this test alone
CONFIG = Template("""
events {}
http {
    map $$http_authorization $$is_known { default 0; "Bearer $token" 1; }
    ssl_certificate $certificate;
    ssl_certificate_key $key;
    ssl_client_certificate $root;
    ssl_verify_client on;
    server {
        listen 127.0.0.1:$https ssl;
        location / {
            if ($$is_known = 0) { return 401; }
            proxy_pass http://127.0.0.1:$triton_http;
            proxy_http_version 1.1;
            proxy_buffering off;
        }
    }
    server {
        listen 127.0.0.1:$grpc ssl http2;
        location / {
            if ($$is_known = 0) { return 401; }
            grpc_pass grpc://127.0.0.1:$triton_grpc;
        }
    }
}
""")


class Guarded(Struct, frozen=True):
    triton: Triton
    authority: Authority
    https: int
    grpc: int

    def server(self, name: str, **more: object) -> dict[str, object]:
        """The settings of it under this name."""
        urls = {
            "http_url": f"https://localhost:{self.https}",
            "grpc_url": f"https://localhost:{self.grpc}",
            "ca_file": str(self.authority.root),
        }
        return {"name": name, **urls, **more}


def is_open(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    authority = Authority(tmp_path / "lab")
    certificate, key = authority.signed("front")
    https, grpc = free_ports(2)
    (files := tmp_path / "nginx").mkdir()
    with Triton(tmp_path / "triton") as triton:
        ports = {
            "https": https,
            "grpc": grpc,
            "triton_http": triton.http_port,
            "triton_grpc": triton.grpc_port,
        }
        signed = {"certificate": certificate, "key": key, "root": authority.root}
        with nginx_by(CONFIG.substitute(token=TOKEN, **ports, **signed), files, lambda: is_open(https)):
            yield Guarded(triton, authority, https, grpc)


def shown(certificate: tuple[Path, Path]) -> dict[str, str]:
    return dict(zip(("cert_file", "key_file"), map(str, certificate), strict=True))


def test_certificate_and_token_open_a_server_over_https_and_grpc(guarded: Guarded, tmp_path: Path) -> None:
    """Loads, requests and calls pass. Without one of the two nothing does, and the doctor says so."""
    own, strangers = guarded.authority.signed("service"), Authority(tmp_path / "other").signed("service")
    (token := tmp_path / "token").write_text(TOKEN)
    (wrong := tmp_path / "wrong").write_text("wrong")
    [port] = free_ports(1)
    held: dict[str, Any] = {"node": "local", "devices": ["GPU-sim-local-0"]}
    held["models"] = {MODEL: {"gpu_mb": 20 * GIB}}
    servers = [
        guarded.server("main", **shown(own), token_file=str(token), **held),
        guarded.server("without-certificate", token_file=str(token)),
        guarded.server("with-a-strangers", **shown(strangers), token_file=str(token)),
        guarded.server("without-token", **shown(own)),
        guarded.server("with-a-wrong-token", **shown(own), token_file=str(wrong)),
    ]
    triton = {"servers": servers, "grpc_port": port}
    with ForkedService(
        tmp_path / "data", engine="simulated", ray={"node_name": "local"}, triton=triton
    ) as service:
        assert infer(service, MODEL) == [1, 2, 3]
        assert ready(guarded.triton) == [MODEL]
        assert call(service, port, MODEL) == [1, 2, 3]
        assert through(service).ask("GET", f"/v2/models/{MODEL}/stats").status == 200

        refused = {
            "without-certificate": 400,
            "with-a-strangers": 400,
            "without-token": 401,
            "with-a-wrong-token": 401,
        }

        def found() -> dict[tuple[str, str], str]:
            """Server and protocol -> the cause of what the doctor says of it."""
            findings = [one for one in service.broker.diagnostics() if one.kind.startswith("model-server-")]
            return {(name, way): one.cause for one in findings for name, way in [one.subject.split()]}

        until(lambda: len(found()) == 2 * len(refused), "each was asked over both protocols")
        for (name, _), cause in found().items():
            assert str(refused[name]) in cause
        assert {model.server for model in service.broker.models().items} == {"main"}
        service.broker.unload_model(MODEL)
        until(lambda: state_of(service.broker, MODEL) == "cold", "it has left")
        assert ready(guarded.triton) == []
