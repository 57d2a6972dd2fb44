"""A run whose newest checkpoints are damaged or gone resumes from the one before, or from the start."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import cloudpickle
from gpubroker import Broker, Task

from tests.e2e.hands import Hands
from tests.e2e.service_process import ServiceProcess, until
from tests.e2e.work import lines_of
from tests.patience import PATIENCE_SECONDS

BOTH: dict[str, Any] = {"gpus": 2, "gpu_mb": 20_000}
"""Another task of this size is the only one that runs."""


def kept(service: ServiceProcess, task: Task) -> list[Path]:
    """The files of the checkpoints that the service keeps of this task, newest first: three at most."""
    query = "SELECT digest FROM checkpoint WHERE task = ? ORDER BY fence DESC, sequence DESC"
    with closing(sqlite3.connect(service.data_dir / "gpubroker.db")) as database:
        digests = [digest for (digest,) in database.execute(query, (task.id,))]
    return [service.data_dir / "blobs" / digest[:2] / digest[2:4] / digest for digest in digests]


def steps_of(witness: Path) -> list[int]:
    return [int(line) for line in lines_of(str(witness))] if witness.exists() else []


def has_gone_on(broker: Broker, task: Task, witness: Path, known: int) -> bool:
    return broker.get(task).state == "running" and len(steps_of(witness)) >= known + 4


def test_damaged_and_missing_checkpoints_are_skipped_for_an_older_one(
    service: ServiceProcess, broker: Broker, tmp_path: Path
) -> None:
    hands, witness, enough = Hands(broker, tmp_path), tmp_path / "steps", tmp_path / "enough"
    task = broker.submit("tests.e2e.work:count", str(witness), str(enough), priority="background", **BOTH)
    until(lambda: len(kept(service, task)) == 3, "it has saved several times")

    urgent = hands.at_work("urgent", priority="critical", **BOTH)
    before = steps_of(witness)
    assert before == list(range(len(before)))
    damaged, missing, intact = kept(service, task)
    saved = [len(cloudpickle.loads(file.read_bytes()[1:])) for file in (damaged, missing, intact)]
    assert len(before) == saved[0] > saved[1] > saved[2] > 0
    damaged.chmod(0o600)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    missing.unlink()
    hands.end(urgent)
    until(lambda: has_gone_on(broker, task, witness, len(before)), "it goes on")
    assert steps_of(witness)[len(before)] == saved[2]
    assert service.log().count("checkpoint skipped") == 2

    urgent = hands.at_work("again", priority="critical", **BOTH)
    before = steps_of(witness)
    for file in kept(service, task):
        file.unlink(missing_ok=True)
    hands.end(urgent)
    until(lambda: has_gone_on(broker, task, witness, len(before)), "it begins anew")
    assert steps_of(witness)[len(before)] == 0
    enough.touch()
    done = broker.result(task, timeout_seconds=PATIENCE_SECONDS)
    assert done == list(range(len(done)))
    assert (broker.get(task).preemptions, broker.get(task).failures) == (2, 0)
