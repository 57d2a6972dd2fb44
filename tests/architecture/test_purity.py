"""What core, runtime and client may import, beyond what import contracts can express."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain

from tests.architecture.source_tree import CORE, ROOT, WIRE, Module, is_stdlib, modules

PURE_STDLIB = frozenset(
    {
        "abc",
        "array",
        "base64",
        "bisect",
        "collections",
        "contextlib",
        "dataclasses",
        "datetime",
        "difflib",
        "enum",
        "fnmatch",  # of strings only: nothing of the core may name a file
        "fractions",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "json",
        "math",
        "operator",
        "re",
        "statistics",
        "string",
        "struct",
        "types",
        "typing",
    }
)
"""What a module of the core, or of the types that it shows, may import of the standard library: no IO, no
clock, no randomness."""

CLOCK_CALLS = frozenset({"now", "utcnow", "today"})
CLOCK_OWNERS = frozenset({"datetime", "date"})

LIST_LOADED = "print(*{name.partition('.')[0] for name in sys.modules})"


def test_core_and_wire_import_only_each_other_msgspec_and_pure_stdlib() -> None:
    foreign = [
        f"{module.path}:{line} imports {name}"
        for module in modules(CORE, WIRE)
        for line, name in module.imports()
        if not re.match(r"gpubroker_server\.core\b|gpubroker\.wire\b|msgspec\b", name)
        and name.partition(".")[0] not in PURE_STDLIB
    ]
    assert foreign == []


def test_the_core_reads_no_clock() -> None:
    assert [f"{m.path}:{line}" for m in modules(CORE) for line in clock_readings(m)] == []


def test_the_core_is_synchronous() -> None:
    waits = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    found = [
        f"{module.path}:{node.lineno}"
        for module in modules(CORE)
        for node in ast.walk(module.tree)
        if isinstance(node, waits)
    ]
    assert found == []


def test_a_clock_reading_is_found() -> None:
    guilty = "import datetime\na = datetime.datetime.now()\nb = date.today()\nc = device.now()\n"
    assert list(clock_readings(Module("core.py", guilty))) == [2, 3]


def test_runtime_imports_only_itself_the_standard_library_and_cloudpickle() -> None:
    foreign = [
        f"{module.path}:{line} imports {top}"
        for module in modules("client/gpubroker/runtime")
        for line, top in module.imported_tops()
        if top not in {"gpubroker", "cloudpickle"} and not is_stdlib(top)
    ]
    assert foreign == []


def test_loading_the_runtime_loads_no_library_but_cloudpickle() -> None:
    names = [
        module.path.removeprefix("client/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for module in modules("client/gpubroker/runtime")
    ]
    extra = loaded_after(f"import {', '.join(names)}") - loaded_after("pass")
    assert {name for name in extra if not is_stdlib(name)} <= {"gpubroker", "cloudpickle"}


def test_the_client_imports_only_libraries_that_it_declares() -> None:
    declared = declared_by_the_client()
    foreign = [
        f"{module.path}:{line} imports {top}"
        for module in modules("client")
        for line, top in module.imported_tops()
        if top != "gpubroker" and not is_stdlib(top) and top not in declared
    ]
    assert foreign == []


def loaded_after(statement: str) -> set[str]:
    script = f"import sys\n{statement}\n{LIST_LOADED}"
    fresh = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(fresh.stdout.split())


def declared_by_the_client() -> set[str]:
    project = tomllib.loads((ROOT / "client/pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {
        re.split(r"[\[<>=!~; ]", wanted, maxsplit=1)[0].lower().replace("-", "_")
        for wanted in [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    }
    return {"yaml" if name == "pyyaml" else name for name in names}


def clock_readings(module: Module) -> Iterator[int]:
    for node in ast.walk(module.tree):
        match node:
            case ast.Call(
                func=ast.Attribute(attr=called, value=ast.Name(id=owner) | ast.Attribute(attr=owner))
            ):
                if called in CLOCK_CALLS and owner in CLOCK_OWNERS:
                    yield node.lineno
