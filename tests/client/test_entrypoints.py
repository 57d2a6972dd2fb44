"""What a run's entrypoint opens: the functions of the module it names, not everything the module imports."""

import json
import sys
from functools import wraps
from os import system as system
from subprocess import run as run
from typing import Any

import pytest
from gpubroker.runtime.invoke import CannotOpen, called, opened
from gpubroker.runtime.journal import Journal
from gpubroker.runtime.messages import RunOrder, RunOutcome
from gpubroker.runtime.task import RunningTask


def double(number: int) -> int:
    return 2 * number


@wraps(double)
def wrapped(number: int) -> int:
    return double(number)


class Model:
    @staticmethod
    def fit(number: int) -> int:
        return double(number)


def outcome_of(entrypoint: str, *args: Any) -> RunOutcome:
    arguments = json.dumps({"args": args}).encode()
    order = RunOrder("t", 1, "entrypoint", entrypoint=entrypoint, arguments=arguments)
    try:
        task = RunningTask(order, Journal(lambda _delay: None))
        return called(opened(order), order, bytes.hex, task)
    except CannotOpen as refusal:
        return refusal.outcome


@pytest.mark.parametrize("name", ["double", "wrapped", "Model.fit"])
def test_a_module_opens_what_it_defines(name: str) -> None:
    assert outcome_of(f"{__name__}:{name}", 4).result == b"8"


def test_a_package_opens_what_its_own_modules_define() -> None:
    assert outcome_of("asyncio:iscoroutine", 1).result == b"false"


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("run", "subprocess"),
        ("system", "posix"),
        ("json.dumps", "json"),
        ("pytest.importorskip", "_pytest.outcomes"),
        ("Model.__subclasses__", "builtins"),
        ("double.__call__", "builtins"),
    ],
)
def test_a_module_does_not_open_what_it_imports(name: str, home: str) -> None:
    fault = outcome_of(f"{__name__}:{name}", "true").fault
    assert fault is not None
    assert fault.kind == "import_failed"
    assert f"is defined in {home}," in fault.message


def test_where_a_module_was_looked_for_is_told_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [f"/srv/jobs/{number}" for number in range(9)]
    monkeypatch.setattr("sys.path", ["", f"{sys.base_prefix}/lib", *places])
    fault = outcome_of("no.such.module:f").fault
    assert fault is not None
    first, heading, *others = fault.message.splitlines()
    assert first == "cannot import no.such.module:f: ModuleNotFoundError: No module named 'no'"
    assert "task_path" in heading
    assert others == [f"  {place}" for place in places[:6]]


def test_a_name_that_its_module_lacks_is_told_in_one_line() -> None:
    fault = outcome_of(f"{__name__}:no_such_function").fault
    assert fault is not None
    assert fault.message.startswith(f"cannot import {__name__}:no_such_function: AttributeError: ")
    assert len(fault.message.splitlines()) == 1
