"""What is imported when somebody first uses it, as Ray's workers do with what Ray seldom uses."""

import sys
from pathlib import Path

import pytest
from gpubroker_server.adapters.ray.head.ray_worker import put_off

NAME = "seldom_used_by_this_test"


@pytest.fixture(autouse=True)
def _there_is_such_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / NAME
    package.mkdir()
    (package / "__init__.py").write_text("answer = 42\n")
    (package / "part.py").write_text("answer = 43\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.delitem(sys.modules, f"{NAME}.part", raising=False)


def test_who_imported_it_meanwhile_has_it_at_its_first_use_and_others_have_the_module_itself() -> None:
    with put_off([NAME]):
        early = __import__(NAME)
    assert NAME not in sys.modules
    assert early.answer == 42
    late = __import__(NAME)
    assert late is sys.modules[NAME] is not early
    assert Path(str(late.__file__)).name == "__init__.py"
    with pytest.raises(AttributeError, match="question"):
        _ = early.question


def test_what_is_used_at_once_is_imported_at_once() -> None:
    with put_off([NAME]):
        part = __import__(f"{NAME}.part", fromlist=["answer"])
        assert part.answer == 43
        assert sys.modules[NAME].answer == 42
    assert sys.modules[NAME].part is part


def test_what_is_there_already_stays() -> None:
    before = __import__(NAME)
    with put_off([NAME]):
        assert sys.modules[NAME] is before
    assert sys.modules[NAME] is before
