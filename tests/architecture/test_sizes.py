"""Functions and names of tests can be read in one go, no file is a drawer for everything, and a class name
means one thing."""

import ast
from collections import defaultdict

from tests.architecture.source_tree import PYTHON_FOLDERS, Function, modules

FILE_LINES = 700
FUNCTION_LINES = 60
TEST_NAME_CHARACTERS = 70


def lines_of(function: Function) -> int:
    """From `def` to the last line of the body, docstring included."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def test_files_have_at_most_700_lines() -> None:
    assert [f"{m.path}: {m.lines} lines" for m in modules(*PYTHON_FOLDERS) if m.lines > FILE_LINES] == []


def test_functions_have_at_most_60_lines() -> None:
    too_long = [
        f"{module.path}:{function.lineno} {function.name}: {lines_of(function)} lines"
        for module in modules(*PYTHON_FOLDERS)
        for function in module.functions()
        if lines_of(function) > FUNCTION_LINES
    ]
    assert too_long == []


def test_names_of_tests_have_at_most_70_characters() -> None:
    """What a shorter name cannot say belongs in the docstring."""
    too_long = [
        f"{module.path}:{function.lineno} {function.name}: {len(function.name)} characters"
        for module in modules("tests")
        for function in module.functions()
        if function.name.startswith("test_") and len(function.name) > TEST_NAME_CHARACTERS
    ]
    assert too_long == []


def test_a_public_class_name_stands_once_in_the_service() -> None:
    models: defaultdict[str, list[str]] = defaultdict(list)
    for module in modules("service"):
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                models[node.name].append(module.path)
    assert {name: paths for name, paths in models.items() if len(paths) > 1} == {}
