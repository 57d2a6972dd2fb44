"""A second process of a benchmark, asked for one thing at a time: JSON lines on its stdin and stdout."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self


class Companion:
    """Runs `python -m MODULE` for as long as the with-block; the module answers with `answer_commands`."""

    module: str

    def environment(self) -> dict[str, str]:
        """What the process finds in its environment besides ours."""
        return {}

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **self.environment()},
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def ask(self, **command: Any) -> Any:
        """Raises RuntimeError when the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.module} ended; what it said is above")
        return json.loads(answer)


def answer_commands(carry_out: Callable[..., Any]) -> None:
    """The companion's side: one answer per command until stdin ends."""
    for line in sys.stdin:
        _say(json.dumps(carry_out(**json.loads(line))) + "\n")


def _say(text: str) -> None:
    """All of it, also through a pipe that does not take it in one piece."""
    left = memoryview(text.encode())
    while left:
        select.select([], [1], [])
        left = left[os.write(1, left) :]
