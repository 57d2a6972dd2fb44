"""Files and functions stay small enough to be read in one go."""

from tests.architecture.source_tree import PYTHON_FOLDERS, Function, modules

FILE_LINES = 400
FUNCTION_LINES = 60


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
