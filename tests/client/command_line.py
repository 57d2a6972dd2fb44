"""The command line in this process: what it prints where, and how it ends."""

import json
import shlex
from collections.abc import Callable
from typing import Any

import pytest
from gpubroker.cli import main
from msgspec import Struct


class Ended(Struct, frozen=True):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ended]
"""`run("show last", "-o", "json")`: the first argument is split as a shell does, the others are words."""


def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("COLUMNS", "200")

    def run(line: str, *words: str) -> Ended:
        monkeypatch.setattr("sys.argv", ["gpubroker", *shlex.split(line), *words])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Ended(int(ended.value.code or 0), printed.out, printed.err)

    return run
