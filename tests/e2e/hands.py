"""Tasks that stay until they are let go, so that a story decides who is there when."""

from pathlib import Path
from typing import Any

from gpubroker import Broker, Task

from tests.e2e.service_process import until
from tests.patience import PATIENCE_SECONDS

SMALL: dict[str, Any] = {"kinds": ["sim-small"], "nodes": {"node": ["n2"]}}
"""One device of 24 GiB of the cluster of two nodes."""
BIG: dict[str, Any] = {"kinds": ["sim-big"], "nodes": {"node": ["n2"]}}
"""One device of 80 GiB, on which each process costs 512 MiB more."""


class Hands:
    """Of one tenant."""

    def __init__(self, broker: Broker, folder: Path) -> None:
        self.broker = broker
        self._folder = folder

    def hold(self, name: str, **demand: Any) -> Task:
        work = {"witness": str(self._folder / "witness"), "until": str(self._folder / name)}
        return self.broker.submit("tests.e2e.work:hold", kwargs=work, name=name, **demand)

    def at_work(self, name: str, **demand: Any) -> Task:
        task = self.hold(name, **demand)
        until(lambda: self.broker.get(task).state == "running", f"{name} runs")
        return self.broker.get(task)

    def waiting(self, name: str, why: str, **demand: Any) -> Task:
        task = self.hold(name, **demand)
        until(lambda: self._why(task) == why, f"{name} waits as {why}")
        return task

    def let_go(self, *tasks: Task) -> None:
        for task in tasks:
            (self._folder / task.name).touch()

    def end(self, *tasks: Task) -> list[Task]:
        """Let them go, and wait until they have succeeded."""
        self.let_go(*tasks)
        ended = [self.broker.wait(task, timeout_seconds=PATIENCE_SECONDS) for task in tasks]
        assert {task.state for task in ended} == {"succeeded"}, ended
        return ended

    def _why(self, task: Task) -> str | None:
        pending = self.broker.get(task).pending
        return None if pending is None else pending.reason
