"""The tasks of the demo, and their results without any interruption."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from gpubroker import Broker, Task

_GIB = 1024  # in MiB
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""The matrices are small: more threads would only compete for the cores."""

_REFERENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Work:
    name: str
    entrypoint: str
    arguments: dict[str, Any]
    gpu_mb: int
    priority: str

    def submit(self, broker: Broker) -> Task:
        return broker.submit(
            self.entrypoint,
            kwargs=self.arguments,
            name=self.name,
            gpu_mb=self.gpu_mb,
            cpu=0.5,
            priority=self.priority,
            grace_seconds=10,
            env=_ONE_THREAD,
        )


def _training(name: str, seed: int, hidden: int, gpu_gib: int) -> Work:
    arguments = {"seed": seed, "hidden": hidden, "epochs": 100, "pace_seconds": 0.05}
    return Work(name, "examples.digits:train", arguments, gpu_gib * _GIB, "background")


TRAININGS = (
    _training("train-large", seed=1, hidden=64, gpu_gib=20),
    _training("train-medium", seed=2, hidden=48, gpu_gib=14),
    _training("train-small", seed=3, hidden=32, gpu_gib=10),
)
"""The trainings of the demo. They take 44 of the 48 GiB of two GPUs, so the evaluation's 18 GiB do not fit
beside them."""

EVALUATION = Work("evaluate-release", "examples.digits:evaluate", {"folds": 5}, 18 * _GIB, "critical")


class Reference:
    """Does the work of the trainings in a process of its own, without a broker."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "examples.demo.workload"],
            stdout=subprocess.PIPE,
            env=os.environ | _ONE_THREAD,
            start_new_session=True,
        )

    def accuracies(self) -> dict[str, float]:
        """Wait for the process and return task name -> accuracy."""
        output, _ = self._process.communicate(timeout=_REFERENCE_SECONDS)
        known: dict[str, float] = json.loads(output)
        return known

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


def undisturbed() -> dict[str, float]:
    from examples.digits import accuracy, learn, new_model

    reached = {}
    for work in TRAININGS:
        model = new_model(work.arguments["seed"], work.arguments["hidden"])
        for _ in learn(model, work.arguments["epochs"]):
            pass
        reached[work.name] = accuracy(model)
    return reached


if __name__ == "__main__":
    print(json.dumps(undisturbed()))
