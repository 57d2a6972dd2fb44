"""gRPC behind TLS: a real Triton that shows a certificate, and asks for the service's own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpubroker_server.adapters.triton.grpc_backend import RpcBackend
from gpubroker_server.bootstrap.grpc_proxy import rpc_server_of
from gpubroker_server.bootstrap.start_checks import StartRefused
from gpubroker_server.ports.backends import CallFailed, Trouble
from gpubroker_server.settings.triton import TritonServerSettings

from tests.authority import Authority
from tests.triton.server import Triton

LIVE = "/inference.GRPCInferenceService/ServerLive"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "lab")


@pytest.fixture(scope="module")
def guarded(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    """It takes calls only of those whose certificate the authority has signed."""
    certificate, key = authority.signed("triton")
    options = [
        *("--grpc-use-ssl=true", "--grpc-use-ssl-mutual=true", f"--grpc-root-cert={authority.root}"),
        *(f"--grpc-server-cert={certificate}", f"--grpc-server-key={key}"),
    ]
    with Triton(tmp_path_factory.mktemp("guarded"), options=options) as running:
        yield running


async def live(triton: Triton, **files: Path) -> bytes:
    """What it answers to a call with these settings. Raises CallFailed."""
    url = f"https://localhost:{triton.grpc_port}"
    given: dict[str, Any] = {"name": "main", "http_url": triton.url, "grpc_url": url, **files}
    backend = RpcBackend(rpc_server_of(TritonServerSettings(**given)))
    try:
        return (await backend.ask(LIVE, b"", (), 20.0)).message
    finally:
        await backend.close()


async def test_with_its_certificate_the_service_is_let_in(guarded: Triton, authority: Authority) -> None:
    certificate, key = authority.signed("service")
    answer = await live(guarded, ca_file=authority.root, cert_file=certificate, key_file=key)
    assert answer == b"\x08\x01"


async def test_without_one_or_with_a_strangers_the_server_is_unreachable(
    guarded: Triton, authority: Authority, tmp_path: Path
) -> None:
    theirs, their_key = Authority(tmp_path / "stranger").signed("service")
    for files in ({}, {"cert_file": theirs, "key_file": their_key}):
        with pytest.raises(CallFailed) as refused:
            await live(guarded, ca_file=authority.root, **files)
        assert refused.value.trouble is Trouble.UNREACHABLE


async def test_a_server_whose_certificate_is_a_strangers_gets_no_call(
    guarded: Triton, authority: Authority, tmp_path: Path
) -> None:
    certificate, key = authority.signed("service")
    other = Authority(tmp_path / "stranger")
    with pytest.raises(CallFailed) as refused:
        await live(guarded, ca_file=other.root, cert_file=certificate, key_file=key)
    assert refused.value.trouble is Trouble.UNREACHABLE


async def test_a_certificate_with_another_ones_key_refuses_the_start(
    guarded: Triton, authority: Authority
) -> None:
    certificate, _ = authority.signed("one")
    _, key = authority.signed("two")
    with pytest.raises(StartRefused, match="cannot use the cert_file and key_file of main"):
        await live(guarded, ca_file=authority.root, cert_file=certificate, key_file=key)


def test_a_certificate_without_its_key_is_no_setting(authority: Authority) -> None:
    with pytest.raises(ValueError, match="one of cert_file and key_file"):
        TritonServerSettings(name="main", http_url="https://h:1", cert_file=authority.root)
