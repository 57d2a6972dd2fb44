"""Files, functions and folders stay small enough to be read in one go, and a class name means one thing."""

import ast
from collections import Counter, defaultdict
from pathlib import PurePosixPath

from tests.architecture.source_tree import PYTHON_FOLDERS, SHIPPED, Function, modules

FILE_LINES = 400
FUNCTION_LINES = 60
FOLDER_FILES = 20


def lines_of(function: Function) -> int:
    """From `def` to the last line of the body, docstring included."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def test_files_have_at_most_400_lines() -> None:
    assert [f"{m.path}: {m.lines} lines" for m in modules(*PYTHON_FOLDERS) if m.lines > FILE_LINES] == []


def test_functions_have_at_most_60_lines() -> None:
    too_long = [
        f"{module.path}:{function.lineno} {function.name}: {lines_of(function)} lines"
        for module in modules(*PYTHON_FOLDERS)
        for function in module.functions()
        if lines_of(function) > FUNCTION_LINES
    ]
    assert too_long == []


def test_folders_have_at_most_20_python_files() -> None:
    files = Counter(str(PurePosixPath(module.path).parent) for module in modules(*SHIPPED))
    assert [f"{folder}: {count} files" for folder, count in files.items() if count > FOLDER_FILES] == []


def test_a_public_class_name_stands_once_in_the_service() -> None:
    models: defaultdict[str, list[str]] = defaultdict(list)
    for module in modules("service"):
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                models[node.name].append(module.path)
    assert {name: paths for name, paths in models.items() if len(paths) > 1} == {}
