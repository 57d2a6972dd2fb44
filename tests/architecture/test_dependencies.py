"""What each distribution imports it declares, and what it declares it imports."""

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.architecture.source_tree import ROOT, Module, is_stdlib, modules

OURS = {"gpubroker": "gpubroker", "gpubroker_server": "gpubroker-server"}
DISTRIBUTIONS = {
    "google": "protobuf",
    "grpc": "grpcio",
    "jwt": "pyjwt",
    "pydantic_core": "pydantic-core",
    "pydantic_settings": "pydantic-settings",
    "prometheus_client": "prometheus-client",
    "pynvml": "nvidia-ml-py",
    "typing_extensions": "typing-extensions",
    "yaml": "pyyaml",
}
"""Where the name of the package is not that of its distribution."""
PROGRAMS = {"pyproject.toml": {"py-spy"}}
"""Declared for what they run as programs; never imported."""
BY_EXTRA = {
    "oidc": ("adapters/oidc.py",),
    "ray": ("adapters/ray/", "adapters/nvml/", "adapters/environments/"),
    "triton": ("adapters/triton/", "inference/protocols/triton_grpc/", "ports/triton_messages.py"),
    "postgres": ("adapters/sql/",),
}
"""Where the libraries of an extra are used."""


@pytest.mark.parametrize(
    ("project", "folders"),
    [("pyproject.toml", ("service", "migrations")), ("client/pyproject.toml", ("client",))],
    ids=["gpubroker-server", "gpubroker"],
)
def test_what_is_imported_is_declared_and_what_is_declared_is_imported(
    project: str, folders: tuple[str, ...]
) -> None:
    declared = _project(project)
    names = {name for group in _groups(declared).values() for name in group}
    imported = {distribution for module in modules(*folders) for distribution in _imported(module)}
    assert imported - {declared["name"]} == names - PROGRAMS.get(project, set())


def test_the_libraries_of_an_extra_are_used_where_that_is_looked_for() -> None:
    """If this fails: name the new place in BY_EXTRA, if a service without the extra never comes there."""
    extras = {name: group for name, group in _groups(_project("pyproject.toml")).items() if name}
    assert extras.keys() == BY_EXTRA.keys()
    for extra, places in BY_EXTRA.items():
        users = [module.path for module in modules("service") if extras[extra] & set(_imported(module))]
        assert users
        for path in users:
            assert path.removeprefix("service/gpubroker_server/").startswith(places), (extra, path)


def test_both_distributions_say_the_same_of_themselves() -> None:
    server, client = _project("pyproject.toml"), _project("client/pyproject.toml")
    for field in ("version", "license", "requires-python", "urls", "classifiers"):
        assert server[field] == client[field], field


def _project(path: str) -> Mapping[str, Any]:
    project: Mapping[str, Any] = tomllib.loads((ROOT / path).read_text(encoding="utf-8"))["project"]
    return project


def _groups(project: Mapping[str, Any]) -> Mapping[str, frozenset[str]]:
    """Names of what is required, by extra; always required under an empty name."""
    groups = {"": project["dependencies"], **project.get("optional-dependencies", {})}
    return {extra: frozenset(Requirement(text).name for text in texts) for extra, texts in groups.items()}


def _imported(module: Module) -> Iterator[str]:
    packages = (package for _, package in module.imported_tops() if not is_stdlib(package))
    return (OURS.get(package) or DISTRIBUTIONS.get(package, package) for package in packages)
