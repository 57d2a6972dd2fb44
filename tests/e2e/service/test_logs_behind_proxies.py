"""A followed log passes the proxies of deploy/proxy line by line while its run goes on, and an nginx that
buffers other answers."""

import ssl
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.authority import Authority
from tests.deploy.proxies import PROXIES, Proxy
from tests.e2e.service_process import ServiceProcess
from tests.patience import PATIENCE_SECONDS
from tests.triton.server import free_ports


@pytest.mark.parametrize("proxy", PROXIES.values(), ids=PROXIES)
def test_each_line_of_a_followed_log_passes_before_the_next_is_printed(
    service: ServiceProcess, tmp_path: Path, proxy: Proxy
) -> None:
    authority = Authority(tmp_path / "lab")
    https, calls, for_grpc = free_ports(3)
    ports = {"service": urlsplit(service.url).port or 0, "calls": calls, "https": https, "grpc": for_grpc}
    gate = tmp_path / "gate"
    run = service.broker.submit("tests.e2e.work:hold_and_say", str(gate), cpu=0.1)
    with (
        proxy(tmp_path / "proxy", ports, *authority.signed("front")) as url,
        httpx.Client(
            base_url=url,
            verify=ssl.create_default_context(cafile=str(authority.root)),
            headers={"Authorization": f"Bearer {service.token}"},
            timeout=PATIENCE_SECONDS / 2,
        ) as client,
        client.stream("GET", f"/tasks/{run.id}/logs", params={"follow": True}) as followed,
    ):
        lines = followed.iter_lines()
        assert next(lines) == "before"
        gate.touch()
        assert list(lines) == ["after"]
