"""The service below a path of a real nginx: clients, addresses in answers, and the log work as without."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from gpubroker import Broker

from tests.bootstrap.refusals import WAITING
from tests.chaos.forked import ForkedService
from tests.deploy.programs import program
from tests.e2e.service_process import until
from tests.patience import PATIENCE_SECONDS
from tests.triton.server import free_ports

CONFIG = """
events {{}}
http {{
    access_log off;
    {places}
    server {{
        listen 127.0.0.1:{port};
        location /lab/gpus/ {{
            proxy_pass {url}/;
            proxy_set_header Host $host;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_set_header X-Forwarded-Prefix /lab/gpus;
        }}
    }}
}}
"""


@contextmanager
def nginx(folder: Path, url: str) -> Iterator[str]:
    [port] = free_ports(1)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    (folder / "nginx.conf").write_text(CONFIG.format(places=places, port=port, url=url))
    rules = f"daemon off; pid {folder}/pid; error_log stderr;" + (" user root;" if os.geteuid() == 0 else "")
    command = [program("nginx"), "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
    with subprocess.Popen([*command, "-g", rules]) as process:
        try:
            front = f"http://127.0.0.1:{port}/lab/gpus"
            until(lambda: _answers(front), "nginx passes requests on")
            yield front
        finally:
            process.terminate()
            process.wait(PATIENCE_SECONDS)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def test_a_service_below_a_path_of_nginx_is_used_as_any_other(tmp_path: Path) -> None:
    front_folder = tmp_path / "front"
    front_folder.mkdir()
    settings = {**WAITING, "trusted_proxies": ["127.0.0.1"], "access_log": True, "log_format": "json"}
    with ForkedService(tmp_path / "data", **settings) as service, nginx(front_folder, service.url) as front:
        with Broker(front, service.token) as broker:
            task = broker.submit("tests.e2e.work:add", cpu=0.5)
            assert broker.get(task).id == task.id
        bearer = {"Authorization": f"Bearer {service.token}", "X-Forwarded-For": "203.0.113.9"}
        wish = {"run": {"entrypoint": "tests.e2e.work:add", "args": [1, 2]}}
        accepted = httpx.post(f"{front}/tasks", json=wish, headers=bearer)
        assert accepted.headers["location"] == f"/lab/gpus/tasks/{accepted.json()['id']}"
        shown = httpx.get(httpx.URL(front).join(accepted.headers["location"]), headers=bearer)
        assert shown.json()["id"] == accepted.json()["id"]
        assert httpx.get(f"{front}/openapi.json").json()["servers"] == [{"url": "/lab/gpus"}]
        lines = [json.loads(line) for line in service.log().splitlines()]
    posts = [line for line in lines if line.get("method") == "POST" and line["status"] == 202]
    assert [line["client"] for line in posts] == ["127.0.0.1", "203.0.113.9"]
