"""Names that say nothing are refused, and signatures say what they return."""

from pathlib import PurePosixPath

from tests.architecture.source_tree import PYTHON_FOLDERS, modules

EMPTY_NAMES = frozenset({"utils", "util", "helpers", "helper", "common", "manager", "base", "misc"})
ANNOTATED = tuple(folder for folder in PYTHON_FOLDERS if folder != "tests")


def test_no_module_is_named_after_nothing() -> None:
    named = [
        m.path
        for m in modules(*PYTHON_FOLDERS)
        if EMPTY_NAMES & set(PurePosixPath(m.path).with_suffix("").parts)
    ]
    assert named == []


def test_every_function_says_what_it_returns() -> None:
    silent = [
        f"{module.path}:{function.lineno} {function.name}"
        for module in modules(*ANNOTATED)
        for function in module.functions()
        if function.returns is None
    ]
    assert silent == []
