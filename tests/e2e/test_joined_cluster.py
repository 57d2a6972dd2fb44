"""A cluster that others run, joined with a token and TLS: its head is lost, and comes back."""

import json
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from gpubroker_server.adapters.ray.head.head import token_environment
from gpubroker_server.settings.ray import RayTls
from msgspec import Struct

from tests.authority import Authority
from tests.e2e.ray_node import RayHead, RayNode
from tests.e2e.service_process import ServiceProcess, until
from tests.patience import PATIENCE_SECONDS

REQUESTED = """
import ray
from ray.experimental.internal_kv import _internal_kv_get
ray.init(address="{address}", log_to_driver=False)
print((_internal_kv_get("autoscaler_resource_request") or b"").decode())
"""


class Site(Struct, frozen=True):
    head: RayNode
    address: str
    token_file: Path
    tls: RayTls
    env: Mapping[str, str]
    """What the processes of Ray there are started with."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    authority = Authority(tmp_path / "lab")
    tls = RayTls(*authority.signed("node"), authority.root)
    env = token_environment(tmp_path) | {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(tls.certificate),
        "RAY_TLS_SERVER_KEY": str(tls.key),
        "RAY_TLS_CA_CERT": str(tls.ca),
    }
    temp_dir = Path(tempfile.mkdtemp(prefix="gpb-", dir="/tmp"))  # the paths of sockets are short
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    try:
        with RayHead(port, "n1", env, temp_dir) as head:
            yield Site(head, f"127.0.0.1:{port}", tmp_path / "ray-token", tls, env)
    finally:
        shutil.rmtree(temp_dir)


def executor_of(service: ServiceProcess) -> str:
    return str(httpx.get(f"{service.url}/readyz").json()["parts"]["executor"])


def is_let_in(site: Site, *, with_certificate: bool) -> bool:
    """True if the head of the cluster talks to a client of its protocol, which trusts its certificate."""
    host, port = site.address.split(":")
    context = ssl.create_default_context(cafile=site.tls.ca)
    context.set_alpn_protocols(["h2"])
    if with_certificate:
        context.load_cert_chain(site.tls.certificate, site.tls.key)
    try:
        with (
            socket.create_connection((host, int(port)), PATIENCE_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            return secured.recv(1) != b""  # the server's settings, which come first
    except (ssl.SSLError, ConnectionError):
        return False


def settings_of(site: Site, **more: object) -> dict[str, Any]:
    tls = {name: str(getattr(site.tls, name)) for name in ("certificate", "key", "ca")}
    ray = {"address": site.address, "token_file": str(site.token_file), "tls": tls}
    return {"ray": {**ray, "cluster": "joined", "spares": 1, "warm_runners": 0, **more}}


def test_tasks_run_on_a_joined_cluster_with_token_and_tls(tmp_path: Path, site: Site) -> None:
    assert is_let_in(site, with_certificate=True)
    assert not is_let_in(site, with_certificate=False)
    with ServiceProcess(tmp_path / "data", {"TMPDIR": str(tmp_path)}, **settings_of(site)) as service:
        assert f"tasks run on the Ray cluster at {site.address}, which was joined" in service.log()
        broker = service.broker
        assert broker.result(broker.submit("tests.e2e.work:add", 1, 2)) == 3
        assert broker.result(broker.submit(lambda a, b: a * b, 6, 7, gpus=1)) == 42
        until(lambda: [gpu.leased_mb for gpu in broker.gpus()] == [0, 0], "the GPU is free again")


@pytest.mark.evidence
def test_cluster_with_token_and_tls_is_joined_and_its_head_may_restart(tmp_path: Path, site: Site) -> None:
    settings = settings_of(site, autoscale=True)
    with ServiceProcess(tmp_path / "data", {"TMPDIR": str(tmp_path)}, **settings) as service:
        broker, flag = service.broker, tmp_path / "flag"
        assert broker.result(broker.submit("tests.e2e.work:add", 1, 2)) == 3
        run = broker.submit("tests.e2e.work:hold", str(tmp_path / "witness"), str(flag), gpus=1, cpu=1.0)
        until(lambda: broker.get(run).state == "running", "it runs")
        waits = broker.submit(["true"], gpus=2, cpu=1.0)
        until(lambda: requested(site) == [{"GPU": 1.0, "CPU": 1.0}, {"GPU": 2.0, "CPU": 1.0}], "it is asked")
        broker.cancel(waits)

        site.head.kill()
        until(lambda: executor_of(service) != "ok", "the loss is said")
        site.head.start()
        until(lambda: executor_of(service) == "ok", "it is joined again")
        until(lambda: broker.get(run).state == "running" and broker.get(run).attempt == 2, "it runs again")
        flag.touch()
        assert broker.result(run) == 2
        assert broker.result(broker.submit("tests.e2e.work:add", 3, 4)) == 7
        assert [gpu.leased_mb for gpu in broker.gpus()] == [0, 0]
        broker.submit(["true"], gpus=2, cpu=1.0)
        until(lambda: requested(site) != [], "it is asked for room again")
    assert requested(site) == [], "Ray would keep nodes for ever"


def requested(site: Site) -> list[dict[str, float]]:
    """What Ray's autoscaler is asked for, as Ray has it."""
    program = REQUESTED.format(address=site.address)
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=dict(site.env), capture_output=True, text=True, check=True)
    found = json.loads(ended.stdout.strip() or "[]")
    print(found)
    return sorted(found, key=lambda bundle: bundle.get("GPU", 0.0))
