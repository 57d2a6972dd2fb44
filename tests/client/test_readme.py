"""The commands of the README and the tutorial, run against the service of `make try`."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpubroker_server.__main__ import DEMO

from tests.chaos.forked import ForkedServiceOnRay
from tests.e2e.service_process import ROOT, ServiceProcess
from tests.patience import PATIENCE_SECONDS

README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
[COMMANDS] = [block for block in SHELL if "gpubroker submit" in block]
TUTORIAL = (ROOT / "docs/tutorial/getting-started.md").read_text(encoding="utf-8")
[CURL] = [
    block for block in re.findall(r"^```sh\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL) if "curl" in block
]
[PROGRAM] = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PLANS = (ROOT / "docs/how-to/check-whether-it-fits.md").read_text(encoding="utf-8")
[(SHOWN_COMMAND, SHOWN)] = re.findall(
    r"^\$ (gpubroker plan [^\n]*)\n(.*?)^```", PLANS, re.MULTILINE | re.DOTALL
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ForkedServiceOnRay(tmp_path_factory.mktemp("state") / "gpubroker", **DEMO) as running:
        yield running


def typed(service: ServiceProcess, script: str) -> str:
    """What a shell on the service's machine prints for this script."""
    state = service.data_dir.parent
    activated = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    environment = {"PATH": activated, "HOME": str(state), "XDG_STATE_HOME": str(state), "COLUMNS": "200"}
    shell = ["bash", "-euo", "pipefail", "-c", script]
    ran = subprocess.run(
        shell, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=PATIENCE_SECONDS
    )
    assert ran.returncode == 0, (script, ran.stdout, ran.stderr)
    return ran.stdout


def test_the_commands_of_the_readme_do_what_it_says(service: ServiceProcess) -> None:
    outputs = {}
    for line in COMMANDS.splitlines():
        command, _, _comment = line.partition("  #")
        if command.startswith("gpubroker"):
            outputs[command.strip()] = typed(service, command)
    printed = {command.removeprefix("gpubroker "): text for command, text in outputs.items()}
    assert (
        printed["submit --wait -- python -c 'print(\"hello\")'"]
        == json.dumps({"exit_code": 0}, indent=2) + "\n"
    )
    assert "WaitingForMemory" in printed["explain last"]
    assert re.search(r"small +pending +54 batch", printed["ps"])
    assert re.search(r"large +running +54 batch", printed["ps"])
    assert json.loads(printed["result last --wait"])["epoch"] == 3
    assert re.search(r"preempted +at .* for small .* from its checkpoint of 20", printed["show large"])
    assert re.search(r"cancelled|stopping", printed["cancel large"])
    assert "2 GPUs (simulated)" in printed["gpus"]
    assert "succeeded 2" in printed["stats"]
    assert printed["token create ci --scope tasks:read --scope tasks:write"].startswith("gpb_")


def test_the_curl_lines_of_the_readme_work(service: ServiceProcess) -> None:
    listening = service.broker.connection.url
    printed = typed(service, CURL.replace("http://127.0.0.1:8470", listening))
    running, explained, cancelled, gpus, stats = documents_in(printed)
    assert all(task["state"] == "running" for task in running["items"])
    assert explained["state"] in ("pending", "admitted", "running")
    assert cancelled["state"] in ("cancelled", "stopping")
    assert len(gpus["items"]) == 2
    assert stats["executor"]["state"] == "connected"


def test_the_program_of_the_readme_prints_its_result(service: ServiceProcess) -> None:
    assert typed(service, f"python - <<'END'\n{PROGRAM}END\n") == "42\n"


@pytest.mark.parametrize("fleet", ["fleet-small", "fleet", "fleet-large"])
def test_the_example_fleets_get_the_answers_in_their_comments(service: ServiceProcess, fleet: str) -> None:
    text = (ROOT / f"examples/{fleet}.yaml").read_text(encoding="utf-8")
    [answer] = re.findall(r"^# -> (.*)$", text, re.MULTILINE)
    [command] = re.findall(r"^# (gpubroker plan .*)$", text, re.MULTILINE)
    code = 0 if answer == "it fits" else 8
    printed = typed(service, f"{command} || test $? -eq {code}")
    assert printed.splitlines()[0] == answer
    if command == SHOWN_COMMAND:
        assert printed == SHOWN


def documents_in(text: str) -> Iterator[Any]:
    """The JSON documents of several answers, printed one after the other."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        document, at = decoder.raw_decode(text, at)
        yield document
        at += len(text[at:]) - len(text[at:].lstrip())
