"""The token and the certificates for a joined Ray are checked before anything starts."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gpubroker_server.bootstrap.start_checks import StartRefused, check_ray_access
from gpubroker_server.settings.loading import Settings
from gpubroker_server.settings.ray import RaySettings, RayTls
from msgspec import Struct

from tests.authority import Authority


class Certificates(Struct, frozen=True):
    certificate: Path
    key: Path
    ca: Path

    @classmethod
    def made_in(cls, folder: Path) -> "Certificates":
        authority = Authority(folder / "lab")
        return cls(*authority.signed("node"), authority.root)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.made_in(tmp_path_factory.mktemp("certificates"))


def joined(**ray: Any) -> Settings:
    return Settings(ray=RaySettings(address="head:6379", **ray))


def tls_of(made: Certificates, **changes: Path) -> RayTls:
    return RayTls(**{"certificate": made.certificate, "key": made.key, "ca": made.ca, **changes})


def test_files_that_are_there_and_fit_are_accepted(certificates: Certificates, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123")
    check_ray_access(joined(token_file=tmp_path / "token", tls=tls_of(certificates)), {})
    check_ray_access(joined(), {})
    check_ray_access(Settings(), {"RAY_USE_TLS": "1"})


@pytest.mark.parametrize("name", ["certificate", "key", "ca"])
def test_a_missing_file_is_refused_by_its_setting(
    certificates: Certificates, tmp_path: Path, name: str
) -> None:
    tls = tls_of(certificates, **{name: tmp_path / "absent.pem"})
    with pytest.raises(StartRefused, match=rf"ray\.tls\.{name}: cannot read .*absent.pem: No such file"):
        check_ray_access(joined(tls=tls), {})


def test_a_file_that_the_service_may_not_read_is_refused(certificates: Certificates, tmp_path: Path) -> None:
    """A directory cannot be read as a file by anybody, root included."""
    with pytest.raises(StartRefused, match=rf"ray\.tls\.key: cannot read {tmp_path}: .*uid {os.geteuid()}"):
        check_ray_access(joined(tls=tls_of(certificates, key=tmp_path)), {})


def test_a_missing_or_empty_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match=r"ray\.token_file: cannot read"):
        check_ray_access(joined(token_file=tmp_path / "absent"), {})
    (tmp_path / "token").touch()
    with pytest.raises(StartRefused, match="token is empty"):
        check_ray_access(joined(token_file=tmp_path / "token"), {})


def test_a_key_of_another_certificate_is_refused(certificates: Certificates, tmp_path: Path) -> None:
    other = Certificates.made_in(tmp_path)
    with pytest.raises(StartRefused, match=r"are not a certificate, its key .*KEY_VALUES_MISMATCH"):
        check_ray_access(joined(tls=tls_of(certificates, key=other.key)), {})


def test_a_key_with_a_passphrase_is_refused_and_not_asked_for(
    certificates: Certificates, tmp_path: Path
) -> None:
    locked = ("-aes256", "-passout", "pass:secret", "-out", tmp_path / "key.pem")
    subprocess.run(["openssl", "pkey", "-in", certificates.key, *locked], check=True, capture_output=True)
    with pytest.raises(StartRefused, match="its key without a passphrase"):
        check_ray_access(joined(tls=tls_of(certificates, key=tmp_path / "key.pem")), {})


def test_what_the_environment_names_is_checked_too(certificates: Certificates, tmp_path: Path) -> None:
    environment = {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(certificates.certificate),
        "RAY_TLS_SERVER_KEY": str(certificates.key),
        "RAY_TLS_CA_CERT": str(certificates.ca),
    }
    check_ray_access(joined(), environment)
    with pytest.raises(StartRefused, match="RAY_USE_TLS is set and RAY_TLS_CA_CERT is not"):
        check_ray_access(joined(), {**environment, "RAY_TLS_CA_CERT": ""})
    shutil.copy(certificates.ca, tmp_path / "ca.pem")
    moved = {**environment, "RAY_TLS_CA_CERT": str(tmp_path / "ca.pem")}
    check_ray_access(joined(), moved)
    (tmp_path / "ca.pem").unlink()
    with pytest.raises(StartRefused, match=r"RAY_TLS_CA_CERT: cannot read"):
        check_ray_access(joined(), moved)


def test_ray_client_address_in_the_environment_is_refused_with_a_remedy() -> None:
    """The remedy is the address to write instead."""
    client = {"RAY_ADDRESS": "ray://other:10001"}
    for settings in (joined(), Settings()):
        with pytest.raises(
            StartRefused, match=r"RAY_ADDRESS: 'ray://other:10001' is .*: other:6379, if .*unset"
        ):
            check_ray_access(settings, client)
        check_ray_access(settings, {"RAY_ADDRESS": "other:6379"})
    check_ray_access(Settings(engine="simulated"), client)
