"""What runs print, on a real Ray: read while they run and afterwards, each run's apart from all others."""

import ctypes
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from gpubroker import Broker, current_task

from tests.e2e.service_process import ServiceProcess
from tests.patience import PATIENCE_SECONDS

SMALL: dict[str, Any] = {"cpu": 0.1, "gpus": 0}
"""Such tasks share a process."""


def talk(gate: str) -> None:
    """In two parts, the second when the gate is there: by Python, by C code, and by a child."""
    print("python")
    libc = ctypes.CDLL(None)
    libc.puts(b"c code")
    libc.fflush(None)
    subprocess.run(["sh", "-c", "echo child; echo child error >&2"], check=True)
    print("python error", file=sys.stderr)
    while not Path(gate).exists():
        time.sleep(0.01)
    print("python again")


def say_rank() -> int:
    print(f"rank {current_task().rank}")
    return 0


def fail_once(witness: str) -> None:
    print(f"attempt {current_task().attempt}")
    if not Path(witness).exists():
        Path(witness).touch()
        raise ValueError("the first time")


def text(broker: Broker, task: object, **wanted: object) -> str:
    """What it has printed to one stream."""
    return "".join(broker.logs(task, **{"stream": "stdout", **wanted}))  # type: ignore[arg-type]


def test_a_log_is_followed_while_the_run_prints_and_read_afterwards(
    service: ServiceProcess, tmp_path: Path
) -> None:
    broker = service.broker
    task = broker.submit(talk, str(tmp_path / "gate"), gpu_mb=1024)
    lines = broker.logs(task, follow=True, stream="stdout")
    before = [next(lines) for _ in range(3)]
    assert before == ["python\n", "c code\n", "child\n"]
    assert list(broker.logs(task, stream="stdout")) == before, (
        "of a running task all that it has printed by now"
    )
    assert text(broker, task, stream="stderr") == "child error\npython error\n"
    service.driver().kill()  # another one takes its place, and asks from the same byte on
    (tmp_path / "gate").touch()
    assert list(lines) == ["python again\n"]
    assert broker.get(task).is_finished
    assert text(broker, task) == "python\nc code\nchild\npython again\n"
    assert text(broker, task, offset=len("python\n")) == "c code\nchild\npython again\n"


def test_both_streams_are_followed_and_each_line_names_its_own(broker: Broker, tmp_path: Path) -> None:
    task = broker.submit(talk, str(tmp_path / "gate"), gpu_mb=1024)
    lines = broker.logs(task, follow=True)
    before = [next(lines) for _ in range(5)]
    printed = {"stdout": ["python\n", "c code\n", "child\n"], "stderr": ["child error\n", "python error\n"]}
    assert {name: [line for line in before if line.stream == name] for name in printed} == printed
    (tmp_path / "gate").touch()
    assert [(line.stream, line) for line in lines] == [("stdout", "python again\n")]
    assert [line.stream for line in broker.logs(task)] == ["stdout"] * 4 + ["stderr"] * 2


def test_no_line_of_one_run_is_in_another_s_log(broker: Broker) -> None:
    names = [f"run{number}" for number in range(12)]
    tasks = {name: broker.submit("tests.e2e.work:say", name, 200, **SMALL) for name in names}
    commands = {
        name: broker.submit(["sh", "-c", f"echo {name}; echo {name} error >&2"]) for name in names[:2]
    }
    followed: dict[str, str] = {}

    def follow(name: str) -> None:
        followed[name] = text(broker, tasks[name], follow=True)

    readers = [threading.Thread(target=follow, args=(name,)) for name in names]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(PATIENCE_SECONDS)
    for name, task in tasks.items():
        assert followed[name] == "".join(f"{name} {number}\n" for number in range(200))
        assert text(broker, task, stream="stderr") == "".join(f"{name} {n} error\n" for n in range(200))
    for name, task in commands.items():
        broker.wait(task, PATIENCE_SECONDS)
        assert (text(broker, task), text(broker, task, stream="stderr")) == (f"{name}\n", f"{name} error\n")


def test_each_rank_and_each_attempt_has_a_log_of_its_own(broker: Broker, tmp_path: Path) -> None:
    gang = broker.submit(say_rank, bundles=[{"gpu_mb": 1024}, {"cpu": 1}])
    assert text(broker, gang, follow=True, rank=1) == "rank 1\n"
    assert text(broker, gang) == "rank 0\n"
    retried = broker.submit(fail_once, str(tmp_path / "failed"), max_retries=1, gpu_mb=1024)
    assert text(broker, retried, follow=True) == "attempt 1\nattempt 2\n"
    assert text(broker, retried, attempt=1) == "attempt 1\n"
    assert text(broker, retried) == "attempt 2\n"


def test_of_a_long_log_the_beginning_and_the_end_are_kept(broker: Broker) -> None:
    task = broker.submit(["sh", "-c", "seq 1 500000"], cpu=1)
    broker.wait(task, PATIENCE_SECONDS)
    lines = list(broker.logs(task, stream="stdout"))
    assert lines[:2] == ["1\n", "2\n"]
    assert lines[-1] == "500000\n"
    [cut] = [line for line in lines if "were not kept" in line]
    assert sum(map(len, lines)) < 2**20 + 100
    after = int(cut.split()[4])
    assert text(broker, task, offset=after) == "".join(lines[lines.index(cut) + 1 :])
