"""A task may print anything, and a terminal obeys what it is shown: titles, the clipboard, hidden lines."""

import os
import subprocess
import sys

import pytest
from gpubroker.cli.printing import harmless

from tests.client.recorded_service import FULL_ID, RecordedService, Reply, a_task, outcome

MAIN = "from gpubroker.cli import main; main()"
EVIL = "\x1b]0;title\x07\x1b]52;c;cm0gLXJmIC8=\x07\x1b[2J\x1b[1;31mred\x1b[0m\x9b5A"


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("plain äöü 漢字 → ok\n\ttabs\n", "plain äöü 漢字 → ok\n\ttabs\n"),
        (EVIL, "red"),
        ("10 %\r50 %\r\ndone\n", "10 %\n50 %\ndone\n"),
        ("rm -rf /\x08\x08\x08\x08\x08\x08\x08\x08ls", "rm -rf /ls"),
        ("\x1b]8;;https://evil.example\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]0;never ended\nnext line", "\nnext line"),
        ("\x1bPq#0~~\x1b\\after\x1b(B\x1bc", "after"),
        ("cut \x1b", "cut "),
        ("cut \x1b[12", "cut 12"),
    ],
)
def test_nothing_is_left_that_a_terminal_would_obey(printed: str, shown: str) -> None:
    assert harmless(printed) == shown


def on_a_terminal(service: RecordedService, *words: str) -> bytes:
    """What the command line writes to a terminal."""
    ours, theirs = os.openpty()
    env = {**os.environ, "GPUBROKER_URL": service.url, "GPUBROKER_TOKEN": "gpb_x", "TERM": "xterm"}
    command = [sys.executable, "-c", MAIN, *words]
    ran = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    written = b""
    try:
        while chunk := os.read(ours, 65536):
            written += chunk
    except OSError:
        pass  # the other side is closed
    finally:
        os.close(ours)
        ran.wait()
    return written


@pytest.mark.parametrize("words", [["logs"], ["result"], ["show"], ["explain"]])
def test_task_output_reaches_a_terminal_without_control_sequences(
    service: RecordedService, words: list[str]
) -> None:
    error = {"kind": "exception", "message": f"it {EVIL}", "traceback": f"Traceback {EVIL}"}
    failed = a_task(FULL_ID, "failed", error=error)
    explained = {"id": FULL_ID, "state": "failed", "message": f"failed: it {EVIL}"}
    answers = {
        "logs": [Reply(200, EVIL.encode()), Reply(200, b"")],
        "result": [outcome("succeeded", value=EVIL, log_tail=EVIL)],
        "show": [Reply(200, failed)],
        "explain": [Reply(200, explained), Reply(200, failed)],
    }
    service.reply_with(*answers[words[0]])
    written = on_a_terminal(service, *words, FULL_ID)
    assert b"red" in written
    for sequence in (b"\x1b]", b"\x1b[2J", b"\x9b"):
        assert sequence not in written


def test_a_pipe_gets_what_a_task_wrote_unchanged(service: RecordedService) -> None:
    service.reply_with(Reply(200, EVIL.encode()), Reply(200, b""))
    env = {**os.environ, "GPUBROKER_URL": service.url, "GPUBROKER_TOKEN": "gpb_x"}
    ran = subprocess.run(
        [sys.executable, "-c", MAIN, "logs", FULL_ID], env=env, capture_output=True, check=True
    )
    assert ran.stdout == EVIL.encode()
