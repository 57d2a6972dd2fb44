"""Entrypoints whose function is not in its module are refused where that can be known."""

from pathlib import Path

import pytest
from gpubroker_server.adapters.python_modules import PythonModules
from gpubroker_server.bootstrap.gateway_role import modules_of, rules_of
from gpubroker_server.core.domain.submission import RunSpec
from gpubroker_server.settings.loading import load_settings
from msgspec.structs import replace

from tests.core.admission.scenes import ANYBODY

MODULE = """
import os
from typing import Any as Whatever

if os.name == "posix":
    def fit(): ...
else:
    fit = None
try:
    from fast import train
except ImportError:
    async def train(): ...
first, (second, *rest) = 1, (2, 3)
for number in range(3):
    last = number
with open(os.devnull) as file:
    (walrus := 1)

class Model:
    def score(self): ...

def make():
    global made
    inner = 1
"""


@pytest.fixture
def modules(tmp_path: Path) -> PythonModules:
    (tmp_path / "team").mkdir()
    (tmp_path / "team" / "__init__.py").write_text("from team.training import fit\n")
    (tmp_path / "team" / "training.py").write_text(MODULE)
    return PythonModules([str(tmp_path)])


BOUND = ("os", "Whatever", "fit", "train", "first", "second", "rest", "number", "last", "file", "walrus")


@pytest.mark.parametrize("name", [*BOUND, "Model", "Model.score", "make", "made"])
def test_a_name_that_a_module_binds_is_known(modules: PythonModules, name: str) -> None:
    assert modules.other_names(f"team.training:{name}") is None
    assert f"team.training:{name}" in modules.known


@pytest.mark.parametrize("name", ["fitt", "inner", "score", "Any"])
def test_a_name_that_a_module_lacks_is_told_with_the_others(modules: PythonModules, name: str) -> None:
    others = modules.other_names(f"team.training:{name}")
    assert others is not None
    assert {"fit", "train", "Model"} <= set(others)
    assert f"team.training:{name}" not in modules.known


@pytest.mark.parametrize(
    "source",
    [
        "from os.path import *", "def __getattr__(name): ...", "globals()['f'] = 1", "exec('f = 1')",
        "import sys\nsetattr(sys.modules[__name__], 'f', 1)", "no python", "x = '" + "y" * 2**20 + "'",
    ],
)  # fmt: skip
def test_of_a_module_that_may_define_more_nothing_is_refused(tmp_path: Path, source: str) -> None:
    (tmp_path / "dynamic.py").write_text(source)
    assert PythonModules([str(tmp_path)]).other_names("dynamic:f") is None


def test_what_is_not_found_as_source_is_not_refused(modules: PythonModules, tmp_path: Path) -> None:
    (tmp_path / "compiled.so").touch()
    for entrypoint in ("nowhere:f", "team.elsewhere:f", "team:training", "compiled:f", "sys:exit"):
        assert modules.other_names(entrypoint) is None, entrypoint


def test_a_function_that_is_added_is_found_at_the_next_submit(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text("def f(): ...\n")
    modules = PythonModules([str(tmp_path)])
    assert modules.other_names("jobs:g") == {"f"}
    (tmp_path / "jobs.py").write_text("def f(): ...\ndef g(): ...\n")
    assert modules.other_names("jobs:g") is None


def test_the_refusal_names_the_function_that_was_meant(modules: PythonModules, tmp_path: Path) -> None:
    settings = load_settings(None, data_dir=tmp_path / "data", entrypoints=["team.*:*"])
    permissions = rules_of(settings, "127.0.0.1", modules).permissions
    refused = permissions.check_run(ANYBODY, RunSpec("entrypoint", "team.training:fitt"))
    assert refused is not None
    [fault] = refused.faults
    assert (fault.code, fault.field) == ("unknown-function", "/run/entrypoint")
    assert fault.message == 'module "team.training" defines no "fitt"; did you mean "fit"?'
    assert permissions.check_run(ANYBODY, RunSpec("entrypoint", "team.training:fit")) is None


def test_modules_are_only_read_where_the_runs_are(tmp_path: Path) -> None:
    settings = load_settings(None, data_dir=tmp_path / "data")
    assert modules_of(settings, leads=True) is not None
    assert modules_of(settings, leads=False) is None
    for elsewhere in (
        replace(settings, engine="simulated"),
        replace(settings, ray=replace(settings.ray, address="head:6379")),
        replace(settings, database_url="postgresql://db/queue"),
    ):
        assert modules_of(elsewhere, leads=True) is None
