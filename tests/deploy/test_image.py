"""The Dockerfile: what its two images hold and how they start.

`tests/deploy/test_containers.py`, in `make evidence`, builds and runs them.
"""

import shlex
import tomllib

import pytest

from tests.architecture.test_pages import is_verb
from tests.deploy.dockerfile import Instruction, stages, variables, with_bases
from tests.deploy.programs import ROOT
from tests.deploy.settings_check import settings_from

STAGES = stages(ROOT / "Dockerfile")
IMAGES = {"server": "serve", "gateway": "gateway"}
SOURCES = {"client", "service", "migrations"}
"""What changes with each commit."""


def last(image: str, name: str) -> Instruction:
    return [one for one in with_bases(STAGES, image) if one.name == name][-1]


def copied(stage: str) -> set[str]:
    """From the repository, into this stage and those that it begins with."""
    own = [one for one in with_bases(STAGES, stage) if one.name == "COPY" and one.from_stage is None]
    return {source for one in own for source in one.sources}


def test_image_copies_exactly_what_the_build_context_holds() -> None:
    wanted = set().union(*map(copied, STAGES))
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    assert [name for name in wanted if not (ROOT / name).exists()] == []
    assert {name.partition("/")[0] for name in wanted} == kept
    assert "*" in ignored
    assert "**/__pycache__" in ignored


@pytest.mark.parametrize("image", IMAGES)
def test_a_change_of_sources_installs_no_dependency_again(image: str) -> None:
    """Dependencies come from stages that have seen no source, in a layer below that of our packages."""
    dependencies, packages = [one for one in STAGES[image].own if one.name == "COPY"]
    assert dependencies.from_stage == f"{image}-dependencies"
    assert packages.from_stage == "packages"
    assert copied(f"{image}-dependencies") == {"pyproject.toml", "uv.lock", "client/pyproject.toml"}
    assert copied("packages") >= SOURCES
    [install] = [one.words for one in STAGES["packages"].own if one.name == "RUN"]
    assert "--no-deps" in install
    assert copied("base") == {"LICENSE"}


@pytest.mark.parametrize("image", IMAGES)
def test_image_installs_locked_dependencies_with_the_extras_it_needs(image: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [install] = [one.words for one in STAGES[f"{image}-dependencies"].own if one.name == "RUN"]
    words = shlex.split(install)
    assert {"--frozen", "--no-default-groups", "--no-install-workspace"} <= set(words)
    taken = {words[at + 1] for at, word in enumerate(words) if word == "--extra"}
    every = set(extras["optional-dependencies"])
    assert (every if "--all-extras" in words else taken) == (every if image == "server" else every - {"ray"})


@pytest.mark.parametrize("image", IMAGES)
def test_it_runs_as_a_user_by_number_under_an_init_with_a_health_check(image: str) -> None:
    user = last(image, "USER").words.partition(":")[0]
    assert user.isdecimal(), "Kubernetes' runAsNonRoot knows no names"
    assert int(user) > 0
    assert last(image, "ENTRYPOINT").command == ["tini", "-s", "--", "gpubroker"]
    assert last(image, "CMD").command == [IMAGES[image]]
    assert is_verb([IMAGES[image]])
    assert last(image, "HEALTHCHECK").command == ["gpubroker", "health"]
    assert is_verb(["health"])


@pytest.mark.parametrize("image", IMAGES)
def test_image_keeps_state_in_its_volume_and_listens_once_hosts_are_named(image: str) -> None:
    found = variables(with_bases(STAGES, image))
    settings = settings_from({name: value for name, value in found.items() if name.startswith("GPUBROKER_")})
    assert str(settings.data_dir) == last(image, "VOLUME").words
    assert settings.data_dir in settings.objects.parents
    assert (settings.host, settings.allowed_hosts) == ("0.0.0.0", ())
    assert str(settings.port) == last(image, "EXPOSE").words
    assert settings.log_format == "json"


@pytest.mark.parametrize("image", IMAGES)
def test_it_carries_the_licence(image: str) -> None:
    own = [one.sources for one in with_bases(STAGES, image) if one.name == "COPY" and one.from_stage is None]
    assert own == [["LICENSE"]]
