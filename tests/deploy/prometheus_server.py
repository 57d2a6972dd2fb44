"""A real Prometheus with the files of deploy/prometheus, on a gateway of the test's own."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.deploy.programs import DEPLOY, program
from tests.e2e.service_process import until
from tests.patience import PATIENCE_SECONDS

QUICKLY = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}


class PrometheusServer:
    def __init__(self, url: str) -> None:
        self._api = httpx.Client(base_url=f"{url}/api/v1", timeout=PATIENCE_SECONDS)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The vector that it is now. Raises HTTPStatusError if Prometheus refuses it."""
        answer = self._api.get("/query", params={"query": expression}).raise_for_status()
        found: list[dict[str, Any]] = answer.json()["data"]["result"]
        return found

    def value(self, expression: str) -> float | None:
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else None

    def targets(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._api.get("/targets").json()["data"]["activeTargets"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        groups = self._api.get("/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


@contextmanager
def a_prometheus(folder: Path, target: str, token: str) -> Iterator[PrometheusServer]:
    """It scrapes `target`, a host with its port; all else is as in deploy/prometheus, but quicker."""
    shutil.copytree(DEPLOY / "prometheus", folder)
    (folder / "token").write_text(token)
    config = yaml.safe_load((folder / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] |= QUICKLY
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "targets.yaml").write_text(yaml.safe_dump([{"targets": [target]}]))
    log = folder / "log"
    words = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program("prometheus"), *words, "--web.listen-address=127.0.0.1:0"], stdout=output, stderr=output
        )
    try:
        heard = re.compile(r'msg="Listening on" address=(\S+)')
        until(lambda: process.poll() is not None or bool(heard.search(log.read_text())), "it listens")
        found = heard.search(log.read_text())
        assert found is not None, log.read_text()
        server = PrometheusServer(f"http://{found[1]}")
        until(lambda: [it["lastScrape"][:4] != "0001" for it in server.targets()] == [True], "it scrapes")
        yield server
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)
