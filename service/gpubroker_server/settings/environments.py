"""The settings of the environments in which runs find their interpreter and packages."""

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from gpubroker_server.core.domain.environment import Environment, EnvironmentKind
from gpubroker_server.core.domain.setting_marks import WORDS, PositiveMib, check
from gpubroker_server.core.domain.units import Mib

Words = Annotated[tuple[str, ...], WORDS]


class BuildRules(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How nodes prepare environments."""

    container_engine: Literal["", "podman", "docker", "apptainer"] = ""
    """The program that runs containers; empty: containers are refused."""
    container_mounts: Words = ()
    """Directories on the nodes that containers see under the same path."""
    cache_mb: PositiveMib = Mib(51_200)
    """The most MiB of built environments that a node keeps for later runs."""
    build_seconds: Annotated[float, Meta(gt=0, le=86_400)] = 1800.0
    """The time after which a build is ended."""
    build_memory_mb: PositiveMib = Mib(8192)
    """The memory that each process of a build may take."""
    build_user: str = ""
    """The user that builds, and to whom built environments belong, if the node runs as root; empty: a user id
    of their own (BUILD_UID), which no account has."""
    index_url: str = ""
    """The package index; empty: PyPI."""
    extra_index_urls: Words = ()
    find_links: Words = ()
    """Directories or pages with wheels, beside the index."""
    offline: bool = False
    """True if builds use only what the node has downloaded before, and `find_links`."""
    download_python: bool = False
    """True if uv may download a Python that the node lacks."""
    python_path: Words = ()
    """Directories on the nodes in which interpreters are looked for before PATH."""
    conda_roots: Words = ()
    """Directories of conda installations on the nodes; empty: the usual places."""


def _are_definitions(named: Mapping[str, Environment]) -> Mapping[str, Environment]:
    for name, environment in named.items():
        if environment.kind is EnvironmentKind.NAMED or environment.name:
            raise ValueError(f"{name} has no python, conda, requirements or container; give it one")
        if environment.project:
            raise ValueError(
                f"{name} has a project, which is an object of one tenant; write its requirements instead"
            )
        for fault in environment.faults():
            raise ValueError(f"{name}: {fault.field} {fault.message}")
    return named


class EnvironmentSettings(BuildRules, frozen=True, kw_only=True):
    builds: bool = True
    """True if submitters may have nodes install packages of their choice."""
    shared: bool = False
    """True if tenants share what nodes have installed for one of them."""
    named: Annotated[Mapping[str, Environment], check(_are_definitions)] = field(default_factory=dict)
    """The operator's environments, which submissions, profiles and model types name."""
