"""The repository's files for the architecture tests: Python modules, and pages."""

import ast
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from subprocess import run

from msgspec import Struct

ROOT = Path(__file__).resolve().parents[2]
CORE = "service/gpubroker_server/core"
WIRE = "client/gpubroker/wire"
SHIPPED = ("service", "client")
PYTHON_FOLDERS = (*SHIPPED, "migrations", "bench", "examples", "tests")
PAGE_FOLDERS = ("docs", "deploy")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module(Struct, frozen=True):
    path: str
    """Relative to the repository, with forward slashes."""
    text: str

    @property
    def tree(self) -> ast.Module:
        """Parsed at each call. Kept, those of all modules would be much of the memory of the process, and all
        tests after these would wait for collections of garbage that go through them."""
        return ast.parse(self.text, self.path)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    def functions(self) -> Iterator[Function]:
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                yield node

    def imports(self) -> Iterator[tuple[int, str]]:
        """Yield the line and the name of each imported module, also of imports inside functions."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                yield node.lineno, node.module

    def imported_tops(self) -> Iterator[tuple[int, str]]:
        """Yield the same with the first parts of the names."""
        for line, name in self.imports():
            yield line, name.partition(".")[0]


@cache
def modules(*folders: str) -> tuple[Module, ...]:
    """Every Python file in these folders, in path order."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            found.append(Module(path.relative_to(ROOT).as_posix(), text))
    return tuple(found)


def pages(root: Path = ROOT) -> list[Path]:
    """The files for people: top-level files, documentation, deployment files."""
    top = [path for path in root.iterdir() if path.is_file() and path.suffix != ".lock"]
    below = [path for folder in PAGE_FOLDERS for path in (root / folder).rglob("*") if path.is_file()]
    return sorted(path for path in top + below if is_ours(path, root))


def is_ours(path: Path, root: Path) -> bool:
    """Whether the file belongs to the repository, and is not just a local file."""
    known = committed(root)
    if known is not None:
        return path.relative_to(root).as_posix() in known
    ignored = (root / ".gitignore").read_text(encoding="utf-8").split()
    return not any(fnmatch(path.name, pattern) for pattern in ignored)


@cache
def committed(root: Path) -> frozenset[str] | None:
    """The committed or staged files; None in an exported tree, or if git refuses to read this one."""
    if not (root / ".git").exists():
        return None
    listed = run(("git", "-C", str(root), "ls-files", "-z"), check=False, capture_output=True, text=True)
    return None if listed.returncode else frozenset(listed.stdout.split("\0"))


def is_stdlib(name: str) -> bool:
    return name in sys.stdlib_module_names
