"""Private parts of a library are used in few places, each with the exact release for which they were read."""

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

from tests.architecture.source_tree import ROOT, SHIPPED, Module, is_stdlib, modules

OURS = ("gpubroker", "gpubroker_server")
PUBLIC = frozenset({"_replace", "_field_defaults", "_fields", "_asdict", "_exit", "_current_frames"})
"""Documented in spite of their names."""


class Use(NamedTuple):
    distribution: str
    release: str
    names: str
    instead: str
    """What replaces the private part when another release of the library is wanted."""


USES = {
    "service/gpubroker_server/adapters/ray/head/start.py": Use(
        "ray",
        "2.60.0",
        "_node_id _ray_params ray._private.node.Node ray._private.parameter.RayParams "
        "ray._raylet.get_port_filename",
        "`ray start --head`: 1.5 s of CPU and the dashboard's process more, and a Ray Client server on port "
        "10001 that a start hook (RAY_START_HOOK) has to switch off",
    ),
    "service/gpubroker_server/adapters/ray/driver/process.py": Use(
        "ray",
        "2.60.0",
        "ray._private.state.available_resources_per_node",
        "ray.available_resources: the use of all object stores together, which says nothing of one node",
    ),
    "service/gpubroker_server/adapters/sql/connections.py": Use(
        "psycopg",
        "3.3.9",
        "_communicate_gen _enqueue_sync _fetch_gen _pipeline",
        "psycopg's own Pipeline: one system call more for each statement",
    ),
    "service/gpubroker_server/adapters/triton/grpc_backend.py": Use(
        "grpcio",
        "1.85.1",
        "_cython_call",
        "StreamStreamCall.write, when it no longer replaces the server's status by a usage error of its own",
    ),
    "service/gpubroker_server/inference/protocols/triton_http/connection.py": Use(
        "uvicorn",
        "0.54.0",
        "_should_upgrade _start_asgi_task _unset_keepalive_if_required _unsupported_upgrade_warning "
        "uvicorn._types.ASGI3Application",
        "a protocol class of our own on httptools",
    ),
}


def test_only_the_listed_files_use_private_parts_of_a_library() -> None:
    found = {module.path: names for module in modules(*SHIPPED) if (names := _private_names(module))}
    assert found == {path: sorted(use.names.split()) for path, use in USES.items()}


@pytest.mark.parametrize("use", USES.values(), ids=lambda use: use.distribution)
def test_the_release_whose_private_parts_are_used_is_pinned(use: Use) -> None:
    """If this fails: read the private parts in the new release, run the tests of that file, and write the
    release here and its bound into pyproject.toml. Or take what stands under `instead`."""
    assert version(use.distribution) == use.release
    bound = _required()[use.distribution].specifier
    major, minor = map(int, use.release.split(".")[:2])
    assert bound.contains(use.release)
    assert not bound.contains(f"{major}.{minor + 1}.0"), f"{use.distribution} has no upper bound"


def _required() -> Mapping[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"].values()
    texts = (text for group in (project["dependencies"], *optional) for text in group)
    return {(it := Requirement(text)).name: it for text in texts}


def _private_names(module: Module) -> list[str]:
    """What this module imports, calls or overrides of libraries although its name begins with `_`."""
    tree = module.tree
    own = {getattr(node, "attr", "") for node in ast.walk(tree) if _is_set_on_self(node)}
    found = {name for name in _imported(tree) if any(map(_is_private, name.split(".")))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own | PUBLIC:
            if ast.unparse(node.value) not in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            found |= _inherited(module, node)
    return sorted(found)


def _is_set_on_self(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    )


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _imported(tree: ast.Module) -> Iterator[str]:
    """Full names of what is imported from libraries."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name for name in names if not _is_known(name.partition(".")[0]))


def _is_known(package: str) -> bool:
    return package in OURS or is_stdlib(package)


def _inherited(module: Module, declared: ast.ClassDef) -> set[str]:
    """Private names in the class that its library's base classes use too: overridden, or relied upon."""
    used = {node.attr for node in ast.walk(declared) if isinstance(node, ast.Attribute)}
    used |= {node.name for node in ast.walk(declared) if isinstance(node, ast.FunctionDef)}
    private = set(filter(_is_private, used))
    name = ".".join(module.path.removesuffix(".py").split("/")[1:])
    if not private or not declared.bases:
        return set()
    ours: type | None = getattr(importlib.import_module(name), declared.name, None)
    if ours is None:
        return set()  # inside a function
    models = {base.__module__ for base in ours.__mro__ if not _is_known(base.__module__.partition(".")[0])}
    models.discard("msgspec._core")  # compiled: a Struct shows its subclasses no private names
    texts = "\n".join(inspect.getsource(importlib.import_module(home)) for home in models)
    return {name for name in private if re.search(rf"\b{name}\b", texts)}
