"""`make demo` does what the first screen says, and leaves nothing behind, interrupted or not."""

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
MARK = "TMPDIR"
"""One of the few variables that the service hands on to its Ray: every process of a demo carries it."""


class Demo:
    """The demo as a process that writes lines, and everything that carries its mark."""

    def __init__(self, folder: Path, output: int = subprocess.PIPE) -> None:
        self._mark = str(folder)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "examples.demo"],
            cwd=ROOT,
            env=os.environ | {MARK: self._mark, "TERM": "xterm", "COLUMNS": "120", "LINES": "50"},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def lines(self) -> list[str]:
        assert self.process.stdout is not None
        return list(self.process.stdout)

    def lines_until(self, said: str) -> list[str]:
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if said in line:
                break
        return lines

    def left(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark:
                    found.append(f"{process.pid} {process.name()}")
        return found


def on_a_terminal(folder: Path) -> tuple[Demo, str]:
    """The demo at its end, and all that its terminal was sent."""
    ours, its = pty.openpty()
    demo = Demo(folder, its)
    os.close(its)
    sent = bytearray()
    with suppress(OSError), open(ours, "rb", buffering=0) as terminal:  # EIO: its other side is closed
        while piece := terminal.read(65536):
            sent += piece
    return demo, sent.decode()


def test_the_demo_preempts_resumes_and_ends_as_if_undisturbed(tmp_path: Path) -> None:
    demo, shown = on_a_terminal(tmp_path)
    assert demo.process.wait() == 0, shown
    told = json.loads(shown.splitlines()[-1])
    assert told["demo"] == "ok"
    for part in ("GPU memory", "░░░", "▓", "is asked to stop (preempt)", "resumed runs reach"):
        assert part in shown
    assert "waits: needs" in shown
    assert sum(told["preemptions"].values()) > 0
    assert min(told["resumed_at_epoch"].values()) > 0
    assert set() < told["reference"].keys() <= told["accuracy"].keys()
    assert all(abs(told["accuracy"][name] - expected) < 1e-9 for name, expected in told["reference"].items())
    assert demo.left() == []


def test_an_interrupted_demo_stops_its_service_and_its_cluster(tmp_path: Path) -> None:
    demo = Demo(tmp_path)
    lines = demo.lines_until("evaluate-release  submitted")
    at_work = {name.partition(" ")[2] for name in demo.left()}
    assert {"gpubroker", "gcs_server", "raylet"} <= at_work, "".join(lines)
    demo.process.send_signal(signal.SIGINT)
    lines += demo.lines()
    assert demo.process.wait() == 130, "".join(lines)
    assert demo.left() == []
