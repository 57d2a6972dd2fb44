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
    """Loads, requests and calls pass. Without one of the two the server does not answer, which is said."""
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

        def refused() -> dict[str, list[str]]:
            """What the service says of the servers that do not answer it."""
            told = service.broker.stats().model_servers
            states = {one.name: [one.http, *([] if one.grpc is None else [one.grpc])] for one in told}
            return {name: [it.fault for it in both if not it.up] for name, both in states.items()}

        until(lambda: all(len(faults) == 2 for faults in list(refused().values())[1:]), "each was asked")
        assert refused()["main"] == []
        for name, status in zip(
            [str(server["name"]) for server in servers[1:]], (400, 400, 401, 401), strict=True
        ):
            assert all(str(status) in fault for fault in refused()[name]), refused()
        service.broker.unload_model(MODEL)
        until(lambda: state_of(service.broker, MODEL) == "cold", "it has left")
        assert ready(guarded.triton) == []
