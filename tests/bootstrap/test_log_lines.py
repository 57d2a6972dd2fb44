"""Lines of the log: their form, and what must not keep a line out or the service from going on."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import structlog
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.telemetry.logs import ConsoleLines, JsonLines

BEHIND = {"level": "warning", "timestamp": "2026-01-02T03:04:05.000006Z"}

FIELDS: list[dict[str, Any]] = [
    {"event": "task accepted", "task": "task_1", "tenant": "default"},
    {"event": "an event that is longer than the column in which it stands", "seconds": 0.25},
    {"event": "quoted", "b": "two words", "a": "x=1", "c": 'say "it"', "d": "it's", "e": "tab\there"},
    {"event": "values", "none": None, "list": [1, "a b"], "state": TaskState.RUNNING, "empty": ""},
    {"event": "nothing more"},
]


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: fields["event"][:12])
def test_a_line_reads_as_structlogs_console_renderer_writes_it(fields: Mapping[str, Any]) -> None:
    plain = structlog.dev.ConsoleRenderer(colors=False)
    line = ConsoleLines()(None, "warning", {**fields, **BEHIND})
    assert line == plain(None, "warning", {**fields, **BEHIND})


def test_a_traceback_stands_below_its_line_without_local_variables() -> None:
    secret = "gpb_secret"
    try:
        raise RuntimeError(f"no {len(secret)}")
    except RuntimeError as error:
        about = {"event": "failed", "exc_info": error, **BEHIND}
    lines = ConsoleLines()(None, "error", dict(about)).splitlines()
    assert lines[0].split()[1:] == ["[warning", "]", "failed"]
    assert lines[-1] == "RuntimeError: no 10"
    found = json.loads(JsonLines()(None, "error", dict(about)))
    assert found["exception"][0]["exc_value"] == "no 10"
    assert secret not in "".join(lines) + json.dumps(found)


@pytest.mark.parametrize("value", [object(), "\ud800", 2**70, {1, 2}, Path("/x")])
def test_json_lines_have_a_form_for_any_value(value: object) -> None:
    found = json.loads(JsonLines()(None, "info", {"event": "odd", "value": value, **BEHIND}))
    assert (found["event"], found["level"]) == ("odd", "warning")
    assert "value" in found


WRITES = """
import logging, sys
import structlog
from gpubroker_server.telemetry.logs import configure_logs, current_request
log = structlog.get_logger("gpubroker.test")
configure_logs("INFO", sys.argv[1], open(sys.argv[2], "w", encoding="ascii"))
log.debug("left out")
current_request.set("req_1")
log.info("ours", task="t", text="\\u00fc")
logging.getLogger("library").warning("theirs %s", 1)
current_request.set("")
log.error("last")
"""


def test_lines_of_the_service_and_of_libraries_have_one_form(tmp_path: Path) -> None:
    written = tmp_path / "lines"
    subprocess.run([sys.executable, "-c", WRITES, "json", str(written)], check=True)
    found = [json.loads(line.encode().decode("unicode_escape")) for line in written.read_text().splitlines()]
    assert [(line["event"], line["level"], line.get("request")) for line in found] == [
        ("ours", "info", "req_1"),
        ("theirs 1", "warning", "req_1"),
        ("last", "error", None),
    ]
    assert all(line["timestamp"].endswith("Z") for line in found)
    assert found[0]["task"] == "t"


def test_a_log_on_a_full_disk_stops_nothing() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WRITES + "print('went on')", "console", "/dev/full"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert ran.stdout == "went on\n"
