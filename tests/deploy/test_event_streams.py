"""An event stream passes the proxies of deploy/proxy message by message, and an nginx that buffers other
answers."""

import ssl
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.authority import Authority
from tests.bootstrap.refusals import WAITING
from tests.chaos.forked import ForkedService
from tests.deploy.proxies import PROXIES, Proxy
from tests.patience import PATIENCE_SECONDS
from tests.triton.server import free_ports


@pytest.mark.parametrize("proxy", PROXIES.values(), ids=PROXIES)
def test_each_event_passes_the_proxy_before_the_next_is_made(tmp_path: Path, proxy: Proxy) -> None:
    authority = Authority(tmp_path / "lab")
    https, calls, for_grpc = free_ports(3)
    with ForkedService(tmp_path / "data", **WAITING) as service:
        ports = {"service": urlsplit(service.url).port or 0, "calls": calls, "https": https, "grpc": for_grpc}
        wanted = {"last": "0", "kind": "task.submitted"}
        with (
            proxy(tmp_path / "proxy", ports, *authority.signed("front")) as url,
            httpx.Client(
                base_url=url,
                verify=ssl.create_default_context(cafile=str(authority.root)),
                headers={"Authorization": f"Bearer {service.token}", "Accept": "text/event-stream"},
                timeout=PATIENCE_SECONDS / 2,
            ) as client,
            client.stream("GET", "/events", params=wanted) as followed,
        ):
            lines = followed.iter_lines()
            assert next(lines) == "retry: 3000"
            for _ in range(3):
                task = service.broker.submit("tests.e2e.work:add")
                assert task.id in next(line for line in lines if line.startswith("data: "))
