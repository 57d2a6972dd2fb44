"""The environment of a submission, as files, fields and options say it."""

from pathlib import Path
from typing import Any

import pytest
from gpubroker.errors import WrongArgument
from gpubroker.runtime.objects import ObjectRef
from gpubroker.tasks.environments import environment_body, project_to_store, with_project

SCRIPT = """#!/usr/bin/env python
# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "numpy>=2",
# ]
# ///
import numpy
"""
PROJECT = '[project]\nname = "x"\nversion = "0"\nrequires-python = ">=3.12"\ndependencies = ["six"]\n'


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_word_that_is_no_file_is_the_operators_name() -> None:
    assert environment_body("rl") == "rl"


def test_requirements_are_read_with_what_they_include(here: Path) -> None:
    (here / "requirements.txt").write_text(
        "# all\nnumpy>=2  # array\n-r more.txt\n\nsix==1.16 \\\n  --hash=sha256:a\n"
    )
    (here / "more.txt").write_text("requests\n")
    expected = ["numpy>=2", "requests", "six==1.16    --hash=sha256:a"]
    assert environment_body("requirements.txt") == {"requirements": expected}
    assert environment_body({"requirements": "requirements.txt", "python": "3.12"}) == {
        "requirements": expected,
        "python": "3.12",
    }


def test_a_scripts_own_metadata_is_its_environment(here: Path) -> None:
    (here / "train.py").write_text(SCRIPT)
    assert environment_body("train.py") == {"requirements": ["numpy>=2"], "python": ">=3.11"}


def test_a_project_without_a_lock_file_is_its_dependencies(here: Path) -> None:
    (here / "pyproject.toml").write_text(PROJECT)
    for named in (".", "pyproject.toml", here):
        assert project_to_store(named) is None
        assert environment_body(named) == {"requirements": ["six"], "python": ">=3.12"}


def test_a_project_with_a_lock_file_is_stored_first(here: Path) -> None:
    (here / "pyproject.toml").write_text(PROJECT)
    (here / "uv.lock").write_text("version = 1\n")
    for named in (".", "uv.lock", {"project": ".", "python": "3.12"}):
        assert project_to_store(named) == Path()
    with pytest.raises(WrongArgument, match=r"has a uv\.lock, which is sent as an object"):
        environment_body(".")
    stored = with_project({"project": ".", "python": "3.12"}, ObjectRef("a" * 64, 9))
    assert environment_body(stored) == {"project": "a" * 64, "python": "3.12"}
    assert environment_body(with_project(".", ObjectRef("a" * 64, 9))) == {"project": "a" * 64}
    assert project_to_store(stored) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (7, "environment must be the operator's name"),
        ({"pip": ["six"]}, "environment has no field 'pip'; its fields are python, conda"),
        ("absent.txt", r"the environment's file absent\.txt cannot be read: No such file"),
        ("editable.txt", r"the option -e is not sent"),
        ("plain.py", r"plain\.py has no script metadata"),
        ("binary.txt", "it is not UTF-8"),
        ("broken/pyproject.toml", r"pyproject\.toml cannot be read"),
    ],
)
def test_what_is_no_environment_is_refused_with_a_remedy(here: Path, given: Any, said: str) -> None:
    (here / "editable.txt").write_text("-e .\n")
    (here / "plain.py").write_text("import numpy\n")
    (here / "binary.txt").write_bytes(b"\xff\xfe")
    (here / "broken").mkdir()
    (here / "broken/pyproject.toml").write_text("[project\n")
    with pytest.raises(WrongArgument, match=said):
        environment_body(given)
