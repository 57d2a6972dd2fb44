"""What the README tells people to type first, typed: against a service whose GPUs are both taken."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.test_pages import FENCED, commands_in
from tests.client.command_line import Run, command_line
from tests.e2e.service_process import ROOT, ServiceProcess, until

README = (ROOT / "README.md").read_text(encoding="utf-8")
[CURL] = [block for block in FENCED.findall(README) if "curl" in block]
COMMANDS = [words[1:] for words in commands_in(README) if words[0] == "gpubroker"]


@pytest.fixture
def state_home(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def service(state_home: Path) -> Iterator[ServiceProcess]:
    allowed = ["team.training:*"]
    with ServiceProcess(state_home / "gpubroker", engine="simulated", entrypoints=allowed) as running:
        with running.broker as broker:
            holder = broker.submit("team.training:fit", kwargs={"seconds": 600}, gpus=2, priority=100)
            until(lambda: broker.get(holder).state == "running", "both GPUs are taken")
        yield running


def test_the_commands_do_what_they_are_listed_for(
    service: ServiceProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUBROKER_DATA_DIR", str(service.data_dir))
    gpubroker: Run = command_line(monkeypatch, capsys)
    said = {words[0]: ended for words in COMMANDS if (ended := gpubroker("", *words)).code == 0}
    assert said.keys() == {words[0] for words in COMMANDS}
    assert "fit" in said["show"].out
    assert "WaitingForMemory" in said["explain"].out
    assert "cancelled" in said["cancel"].out
    assert "stopped" in said["down"].err


def test_the_curl_lines_work_as_they_stand(service: ServiceProcess, state_home: Path) -> None:
    listening = service.broker.connection.url
    lines = CURL.replace("http://127.0.0.1:8470", listening).splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("ask http"))
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(state_home), "XDG_STATE_HOME": str(state_home)}

    def typed(*typed_lines: str) -> list[Any]:
        script = "\n".join([*lines[:begin], *typed_lines])
        ran = subprocess.run(
            ["bash", "-euc", script], capture_output=True, text=True, check=True, env=environment
        )
        return list(documents_in(ran.stdout.replace("\n", "")))

    [queued] = typed(lines[begin])
    assert queued["state"] == "pending"
    asked = [line.replace("TASK", queued["id"]) for line in lines[begin + 1 :]]
    pending, explained, cancelled, gpus, stats = typed(*asked)
    assert [task["id"] for task in pending["items"]] == [queued["id"]]
    assert explained["reason"] == "WaitingForMemory"
    assert cancelled["state"] == "cancelled"
    assert len(gpus["items"]) == 2
    assert stats["tasks"]["cancelled"] == 1


def documents_in(text: str) -> Iterator[Any]:
    """The JSON documents of several answers, printed one after the other."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        document, at = decoder.raw_decode(text, at)
        yield document
