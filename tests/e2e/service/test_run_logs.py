"""What runs print, read while they run and afterwards."""

import ctypes
import subprocess
import sys
import time
from pathlib import Path

from gpubroker import Broker


def talk(gate: str) -> None:
    """In two halves, the second when the gate is there; by Python, by C code, and by a child."""
    print("python before")
    ctypes.CDLL(None).puts(b"c code")
    ctypes.CDLL(None).fflush(None)
    subprocess.run(["sh", "-c", "echo child; echo child error >&2"], check=True)
    print("python error", file=sys.stderr)
    while not Path(gate).exists():
        time.sleep(0.01)
    print("python after")


def test_a_log_is_followed_while_the_run_prints_and_read_afterwards(broker: Broker, tmp_path: Path) -> None:
    task = broker.submit(talk, str(tmp_path / "gate"), gpu_mb=1024)
    lines = broker.logs(task, follow=True)
    before = [next(lines) for _ in range(3)]
    assert before == ["python before\n", "c code\n", "child\n"]
    assert list(broker.logs(task)) == before, "of a running task all that it has printed by now"
    assert list(broker.logs(task, stream="stderr")) == ["child error\n", "python error\n"]
    (tmp_path / "gate").touch()
    assert list(lines) == ["python after\n"]
    assert broker.get(task).is_finished
    assert list(broker.logs(task)) == [*before, "python after\n"]
    assert list(broker.logs(task, offset=len("python before\n"))) == [*before[1:], "python after\n"]
    assert list(broker.logs(task, stream="stderr", follow=True)) == ["child error\n", "python error\n"]
