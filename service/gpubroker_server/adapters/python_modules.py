"""Reads from the source of modules which names they define. Nothing is imported."""

import ast
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

_DYNAMIC = frozenset({"__getattr__", "exec", "eval", "globals", "locals", "setattr", "vars", "modules"})
"""A module that uses one of these names may define others that its source does not show."""
_MAX_BYTES = 2**20
_MAX_KNOWN = 10_000


class PythonModules:
    """Finds modules where the runs of this machine find them: in the operator's `task_path`, then in
    Python's own path."""

    def __init__(self, task_path: Sequence[str]) -> None:
        self._folders = [Path(path) for path in (*task_path, *sys.path) if path]
        self.known: set[str] = set()
        """The entrypoints that need no further check: their functions exist, or the source does not show
        whether they do."""

    def other_names(self, entrypoint: str) -> Collection[str] | None:
        """Return the names that the module defines if it certainly lacks the function; otherwise None."""
        module, _, path = entrypoint.partition(":")
        file = self._file_of(module.split("."))
        names = None if file is None else _names_in(file)
        name = path.partition(".")[0]
        if names is None or name in names or (file is not None and _is_submodule(file, name)):
            if len(self.known) < _MAX_KNOWN:
                self.known.add(entrypoint)
            return None
        return names

    def _file_of(self, parts: Sequence[str]) -> Path | None:
        """Return the file of a module; None if it has no source. As in an import, only the first folder with
        the top-level name counts."""
        for folder in self._folders:
            if any(folder.glob(f"{parts[0]}.*")) or (folder / parts[0]).is_dir():
                inner = folder.joinpath(*parts)
                candidates = (inner / "__init__.py", inner.with_suffix(".py"))
                return next((file for file in candidates if file.is_file()), None)
        return None


def _is_submodule(file: Path, name: str) -> bool:
    return file.name == "__init__.py" and any(file.parent.glob(f"{name}*"))


def _names_in(file: Path) -> Collection[str] | None:
    """Return the names that a module may have; None if its source does not show all of them."""
    try:
        if file.stat().st_size > _MAX_BYTES:
            return None
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            return None
        if not _DYNAMIC.isdisjoint(_words(node)):
            return None
        if isinstance(node, ast.Global):
            names.update(node.names)
    names.update(_defined_by(tree.body))
    return names


def _words(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=word) | ast.Attribute(attr=word) | ast.FunctionDef(name=word):
            yield word


def _defined_by(body: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the names that statements bind in their module, also within branches and loops."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in aliases)
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                pass
            case _:
                yield from _defined_by(list(ast.iter_child_nodes(node)))
