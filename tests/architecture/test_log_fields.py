"""Log lines use the fields of one table, so that they can be searched across the whole service."""

import ast
from collections.abc import Iterator

from gpubroker_server.telemetry.logs import LOG_FIELDS

from tests.architecture.source_tree import Module, modules

LEVELS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})


def fields_logged(module: Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module.tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=level, value=ast.Name(id="log"))) if level in LEVELS:
                yield from (
                    (node.lineno, word.arg) for word in node.keywords if word.arg not in {None, "exc_info"}
                )


def test_every_logged_field_is_in_the_table() -> None:
    """If this fails: use a field of `LOG_FIELDS` in telemetry/logs.py, or add yours there."""
    unknown = [
        f"{module.path}:{line} {field}"
        for module in modules("service")
        for line, field in fields_logged(module)
        if field not in LOG_FIELDS
    ]
    assert unknown == []
