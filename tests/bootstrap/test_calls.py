"""From settings to the server of models over gRPC, and to the port for it."""

import socket
from pathlib import Path
from typing import Any

import pytest
from gpubroker_server.bootstrap.grpc_proxy import rpc_server_of
from gpubroker_server.bootstrap.start_checks import StartRefused
from gpubroker_server.settings.triton import TritonServerSettings

from tests.bootstrap.refusals import WAITING, refusal
from tests.chaos.forked import ForkedService

CERTIFICATE = Path(__file__).parents[1] / "gateway" / "self_signed.pem"


def given(**fields: Any) -> TritonServerSettings:
    plain = {"http_url": "http://triton.lab:8000", "grpc_url": "http://triton.lab:8001"}
    return TritonServerSettings(name="main", **{**plain, **fields})


def test_credentials_become_metadata_in_lowercase(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n", encoding="ascii")
    server = rpc_server_of(given(token_file=tmp_path / "token", headers={"X-Group": "lab"}))
    assert (server.address, server.roots) == ("triton.lab:8001", None)
    assert server.metadata == (("x-group", "lab"), ("authorization", "Bearer s3cret"))


def test_ca_file_is_trusted_besides_the_certificates_of_the_system() -> None:
    own = CERTIFICATE.read_bytes()
    with_file = rpc_server_of(given(grpc_url="https://triton.lab:8443", ca_file=CERTIFICATE)).roots
    without = rpc_server_of(given(grpc_url="https://triton.lab:8443")).roots
    assert with_file is not None
    assert without is not None
    assert with_file.endswith(own)
    assert with_file.startswith(without)
    with pytest.raises(StartRefused, match="cannot use the ca_file of main"):
        rpc_server_of(given(grpc_url="https://h:1", ca_file=Path("/nowhere/ca")))


def test_a_port_for_calls_that_is_taken_refuses_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = {"name": "main", "http_url": "http://127.0.0.1:1", "grpc_url": "http://127.0.0.1:1"}
        triton = {"servers": [server], "grpc_port": port}
        said = refusal(ForkedService(tmp_path / "data", **WAITING, triton=triton))
    assert f"cannot listen on 127.0.0.1:{port} for gRPC" in said
    assert "choose another triton.grpc_port" in said
