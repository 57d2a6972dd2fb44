"""Modules have meaningful names, and functions have return annotations."""

from pathlib import PurePosixPath

from tests.architecture.source_tree import PYTHON_FOLDERS, modules

VAGUE_NAMES = frozenset({"utils", "util", "helpers", "helper", "common", "manager", "base", "misc"})
ANNOTATED = tuple(folder for folder in PYTHON_FOLDERS if folder != "tests")


def test_no_module_has_a_vague_name() -> None:
    named = [
        m.path
        for m in modules(*PYTHON_FOLDERS)
        if VAGUE_NAMES & set(PurePosixPath(m.path).with_suffix("").parts)
    ]
    assert named == []


def test_every_function_has_a_return_annotation() -> None:
    unannotated = [
        f"{module.path}:{function.lineno} {function.name}"
        for module in modules(*ANNOTATED)
        for function in module.functions()
        if function.returns is None
    ]
    assert unannotated == []
