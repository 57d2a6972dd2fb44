"""Where a running task is, on real Ray: its Python threads, read while they go on."""

import sys
from functools import partial
from pathlib import Path

import pytest
from gpubroker import Broker, Refused

from tests.e2e.service_process import is_running, until
from tests.e2e.work import lines_of
from tests.patience import PATIENCE_SECONDS

SLEEPS = "import time\ndef wait_here():\n    time.sleep(600)\nwait_here()"


@pytest.mark.parametrize("cpu", [0.1, 1.0], ids=["beside others in one process", "in its own process"])
def test_a_function_shows_where_it_is_and_goes_on(broker: Broker, tmp_path: Path, cpu: float) -> None:
    witness, flag = tmp_path / "witness", tmp_path / "flag"
    work = {"witness": str(witness), "until": str(flag)}
    task = broker.submit("tests.e2e.work:hold", kwargs=work, cpu=cpu)
    beside = {"witness": str(tmp_path / "other"), "enough": str(flag)}
    other = broker.submit("tests.e2e.work:count", kwargs=beside, cpu=cpu)
    until(witness.exists, "it runs")
    until(lambda: broker.get(task).state == "running", "the service knows")
    seen = broker.stack(task)
    assert seen.stack is not None, seen.message
    assert "in hold" in seen.stack
    assert "tests/e2e/work.py" in seen.stack
    assert ("MainThread" in seen.stack) is (cpu == 1.0), "a shared process shows this run alone"
    assert "in count" not in seen.stack
    flag.touch()
    broker.wait(other)
    assert broker.result(task, timeout_seconds=PATIENCE_SECONDS) == 1
    with pytest.raises(Refused) as refused:
        broker.stack(task)
    assert refused.value.code == "task-not-running"


def test_a_command_shows_its_python_and_says_when_it_has_none(broker: Broker) -> None:
    python = broker.submit(["sh", "-c", f"{sys.executable} -c '{SLEEPS}'; true"])
    plain = broker.submit(["sleep", "600"])
    for task in (python, plain):
        until(partial(is_running, broker, task), "it runs")
    until(lambda: "in wait_here" in (broker.stack(python).stack or ""), "its Python has begun")
    until(lambda: "sleep" in broker.stack(plain).message, "its command has begun")
    seen = broker.stack(plain)
    assert (seen.stack, "none of its processes is Python" in seen.message) == (None, True)


def test_each_rank_of_a_gang_shows_its_own_threads(broker: Broker, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    witness.touch()
    gang = broker.submit(
        "tests.e2e.work:stay", str(witness), bundles=[{"count": 2, "gpu_mb": 1000}], grace_seconds=20
    )
    until(lambda: len(lines_of(str(witness))) == 2, "both ranks run")
    until(lambda: broker.get(gang).state == "running", "the service knows")
    stacks = [broker.stack(gang, rank=rank) for rank in (0, 1)]
    assert all("in stay" in (seen.stack or "") for seen in stacks)
    assert stacks[0].stack != stacks[1].stack
    with pytest.raises(Refused) as refused:
        broker.stack(gang, rank=2)
    assert refused.value.code == "validation-failed"
