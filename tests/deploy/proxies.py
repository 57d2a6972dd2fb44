"""The proxies of deploy/proxy, each started on ports and certificates of a test's own."""

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import httpx

from tests.deploy.programs import DEPLOY, program
from tests.e2e.service_process import until
from tests.patience import PATIENCE_SECONDS

NOBODY = "127.0.0.1:9"
"""The discard port: a second gateway that cannot be reached."""


def nginx_file(text: str, ports: Mapping[str, int], certificate: Path, key: Path) -> str:
    """The example with what an operator replaces."""
    changes = {
        "gpus.example.org": "localhost",
        "/etc/ssl/gpubroker/fullchain.pem": str(certificate),
        "/etc/ssl/gpubroker/key.pem": str(key),
        "127.0.0.1:8470": f"127.0.0.1:{ports['service']}",
        "# server 10.0.0.6:8470": f"server {NOBODY}",
        "127.0.0.1:8471": f"127.0.0.1:{ports['calls']}",
        "listen 443": f"listen 127.0.0.1:{ports['https']}",
        "listen 8001": f"listen 127.0.0.1:{ports['grpc']}",
    }
    for example, here in changes.items():
        assert example in text
        text = text.replace(example, here)
    return text


@contextmanager
def nginx(
    folder: Path, ports: Mapping[str, int], certificate: Path, key: Path, *, buffers: bool = False
) -> Iterator[str]:
    """`buffers`: as nginx does where it is not told otherwise."""
    folder.mkdir()
    example = (DEPLOY / "proxy/nginx.conf").read_text(encoding="utf-8")
    if buffers:
        example = example.replace("proxy_buffering off;", "")
    url = f"https://localhost:{ports['https']}"
    with nginx_by(nginx_file(example, ports, certificate, key), folder, lambda: _answers(url)):
        yield url


@contextmanager
def nginx_by(text: str, folder: Path, answers: Callable[[], bool]) -> Iterator[None]:
    """An nginx with this configuration, whose files are in `folder`, once `answers` says that it is there."""
    places = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    config.write_text(text.replace("http {", f"http {{ access_log off; {places}", 1))
    rules = f"daemon off; pid {folder}/pid; error_log stderr;" + (" user root;" if os.geteuid() == 0 else "")
    command = [program("nginx"), "-p", str(folder), "-c", str(config), "-e", "stderr", "-g", rules]
    with _running(folder, command, {}, answers):
        yield


@contextmanager
def caddy(folder: Path, ports: Mapping[str, int], certificate: Path, key: Path) -> Iterator[str]:
    folder.mkdir()
    config = folder / "Caddyfile"
    example = (DEPLOY / "proxy/Caddyfile").read_text(encoding="utf-8")
    own = "\ttls {$CERTIFICATE} {$KEY}\n"
    example = example.replace("{$SITE} {\n", "{$SITE}:{$PORT} {\n" + own)
    example = example.replace("{$SITE}:{$GRPC_PORT:8001} {\n", "{$SITE}:{$GRPC_PORT:8001} {\n" + own)
    assert example.count(own) == 2
    config.write_text("{\n\tadmin off\n\tauto_https disable_redirects\n}\n" + example)
    variables = {
        "SITE": "localhost",
        "PORT": str(ports["https"]),
        "GRPC_PORT": str(ports["grpc"]),
        "GATEWAYS": f"{NOBODY} 127.0.0.1:{ports['service']}",
        "GRPC_GATEWAYS": f"h2c://127.0.0.1:{ports['calls']}",
        "CERTIFICATE": str(certificate),
        "KEY": str(key),
        "XDG_DATA_HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
    }
    command = [program("caddy"), "run", "--config", str(config), "--adapter", "caddyfile"]
    url = f"https://localhost:{ports['https']}"
    with _running(folder, command, variables, lambda: _answers(url)):
        yield url


@contextmanager
def _running(
    folder: Path, command: list[str], variables: Mapping[str, str], answers: Callable[[], bool]
) -> Iterator[None]:
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **variables})
    try:
        until(lambda: process.poll() is not None or answers(), "the proxy answers")
        assert process.poll() is None, log.read_text()
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", verify=False).status_code == 200
    except httpx.TransportError:
        return False


Proxy = Callable[[Path, Mapping[str, int], Path, Path], AbstractContextManager[str]]
PROXIES: Mapping[str, Proxy] = {
    "nginx": nginx,
    "nginx that buffers": partial(nginx, buffers=True),
    "caddy": caddy,
}
