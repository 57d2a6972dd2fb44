"""From settings to the server of models: addresses, credentials, and files that cannot be used."""

import json
from pathlib import Path
from typing import Any

import pytest
from gpubroker_server.bootstrap.model_servers import server_of, servers_of
from gpubroker_server.bootstrap.start_checks import StartRefused, batches_without_effect
from gpubroker_server.settings.loading import load_settings
from gpubroker_server.settings.triton import TritonServerSettings

CERTIFICATE = Path(__file__).parents[1] / "gateway" / "self_signed.pem"


MAIN = {"name": "main", "http_url": "http://triton.lab:8000"}


def given(**fields: Any) -> TritonServerSettings:
    return TritonServerSettings(name="main", **{"http_url": "http://triton.lab:8000", **fields})


def test_without_a_configured_server_there_are_no_backends() -> None:
    assert servers_of(load_settings()) == []


def test_a_server_is_reached_at_its_address() -> None:
    server = server_of(given(http_url="http://[::1]:8000/"))
    assert (server.host, server.port, server.authority, server.tls) == ("::1", 8000, b"[::1]:8000", None)


def test_a_token_is_read_from_its_file_and_sent_beside_other_headers(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n", encoding="ascii")
    server = server_of(given(token_file=tmp_path / "token", headers={"X-Group": "lab"}))
    assert server.headers == ((b"X-Group", b"lab"), (b"Authorization", b"Bearer s3cret"))


def test_https_is_believed_by_the_certificates_of_the_file() -> None:
    server = server_of(given(http_url="https://triton.lab:443", ca_file=CERTIFICATE))
    assert server.tls is not None
    assert any("gpubroker" in str(one["subject"]) for one in server.tls.get_ca_certs())


@pytest.mark.parametrize(
    ("triton", "says"),
    [
        ({}, ""),
        ({"batch": {"m": {}}}, "triton.batch (m) has no effect: triton.servers names no server"),
        ({"batch": {"m": {}}, "servers": [MAIN]}, "triton.batch (m) joins queued inferences only"),
        ({"batch": {"m": {}}, "servers": [{**MAIN, "node": "n1", "grpc_url": "http://h:8001"}]}, ""),
    ],
)
def test_a_batch_setting_without_effect_is_named(tmp_path: Path, triton: dict[str, Any], says: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({"triton": triton}))
    said = batches_without_effect(load_settings(file))
    assert said.startswith(says)
    assert bool(said) is bool(says)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"token_file": Path("/nowhere/token")}, "cannot read the token_file of main"),
        ({"token_file": CERTIFICATE}, "should hold one token"),
        ({"ca_file": Path("/nowhere/ca"), "http_url": "https://h:1"}, "cannot use the ca_file of main"),
        ({"ca_file": Path(__file__), "http_url": "https://h:1"}, "cannot use the ca_file of main"),
    ],
)
def test_an_unusable_credentials_file_refuses_the_start(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(StartRefused, match=said):
        server_of(given(**fields))
