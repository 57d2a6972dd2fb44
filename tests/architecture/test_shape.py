"""Modules have meaningful names, functions have return annotations, and ports implement nothing."""

import ast
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


PROTOBUF_CLASSES = "service/gpubroker_server/ports/triton_messages.py"
"""It makes classes of a table. `adapters` and `inference` both need them, and nothing else is below both."""


def test_ports_hold_protocols_and_values_only() -> None:
    functions = [
        f"{module.path}:{node.lineno} {node.name}"
        for module in modules("service/gpubroker_server/ports")
        if module.path != PROTOBUF_CLASSES
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    waiting = [
        f"{module.path}:{method.lineno} {method.name}"
        for module in modules("service/gpubroker_server/ports")
        for node in module.tree.body
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.AsyncFunctionDef) and not _declares(method)
    ]
    assert functions + waiting == []


def _declares(method: ast.AsyncFunctionDef) -> bool:
    """True if it has no statements but a docstring."""
    return all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in method.body)
