"""A second process of a benchmark, which answers one command at a time: JSON lines on stdin and stdout."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

NO_UV = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
"""Turns off Ray's support of uv. With it, Ray packs the folder and starts each worker by `uv run` if the
benchmark was started so."""


class ChildProcess:
    """Runs `python -m MODULE` during the with-block; the module answers with `answer_commands`."""

    module: str

    def environment(self) -> dict[str, str]:
        """The variables to add to the environment of the process."""
        return {}

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **NO_UV, **self.environment()},
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
        """Send a command and return its answer. Raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.module} ended; its output is above")
        return json.loads(answer)


def answer_commands(carry_out: Callable[..., Any]) -> None:
    """Answer commands, in the child process, until stdin ends."""
    for line in sys.stdin:
        _write(json.dumps(carry_out(**json.loads(line))) + "\n")


def _write(text: str) -> None:
    """Write the whole text, even to a pipe that takes only a part at a time."""
    left = memoryview(text.encode())
    while left:
        select.select([], [1], [])
        left = left[os.write(1, left) :]
