"""Environments on disk, with real uv and real processes: built, found again, removed, and under limits."""

import asyncio
import os
import pwd
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpubroker.runtime.messages import RunKey
from gpubroker_server.adapters.environments.brought import Brought
from gpubroker_server.adapters.environments.builder import (
    BUILD_UID,
    build,
    build_user,
    commands_of,
    env_of,
    lay_out,
    size_below,
)
from gpubroker_server.adapters.environments.cache import EnvironmentCache
from gpubroker_server.adapters.environments.containers import ContainerRun, container_words, fetch_image
from gpubroker_server.adapters.environments.interpreters import CannotPrepare, Interpreter, find_interpreter
from gpubroker_server.adapters.environments.processes import ProcessLimits, ProcessUser, run_limited
from gpubroker_server.adapters.ray.agent.run_environments import home_of
from gpubroker_server.core.domain.environment import Environment
from gpubroker_server.settings.environments import BuildRules

from tests.e2e.wheels import PACKAGE, make_wheel

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = Environment(python=PYTHON, requirements=(f"{PACKAGE}==1.0",))
LIMITS = ProcessLimits(4096, 60.0)


@pytest.mark.parametrize("task_user", ["", "nobody-of-this-name"])
def test_a_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch, task_user: str) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert home_of(task_user) == ""


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory into which every user may come, unlike that of a test."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


async def built(cache: EnvironmentCache, root: Path, key: str, *, task_user: str = "nobody") -> Interpreter:
    make_wheel(root / "wheels")
    rules = BuildRules(find_links=(str(root / "wheels"),), offline=True)
    cache.open()
    place, user = cache.place(key, "acme"), build_user(rules, task_user)
    lay_out(PACKAGES, b"", place, user)
    steps: list[str] = []
    lines: list[str] = []
    prepared = await build(PACKAGES, place, rules, user, "n1", lines.append, steps.append, asyncio.sleep)
    assert steps[-1] == "about to end"
    assert "".join(lines).startswith("$ uv venv")
    return Interpreter(prepared.python, prepared.interpreter, prepared.prefix, (), size_below(place.target))


def module_in(prefix: str) -> Path:
    return next(Path(prefix).rglob(f"{PACKAGE}/__init__.py"))


async def test_a_built_environment_belongs_to_a_user_that_no_task_runs_as(root: Path) -> None:
    cache = EnvironmentCache(root / "cache", 2**30)
    prepared = await built(cache, root, "e1")
    assert prepared.python == PYTHON
    assert prepared.prefix == str(root / "cache/built/e1")
    status = module_in(prepared.prefix).stat()
    assert status.st_uid == (BUILD_UID if os.geteuid() == 0 else os.geteuid())
    assert status.st_mode & 0o022 == 0
    assert prepared.size_bytes > 1000


async def test_a_later_agent_finds_what_was_finished_and_removes_the_rest(root: Path) -> None:
    cache = EnvironmentCache(root / "cache", 2**30)
    prepared = await built(cache, root, "e1")
    assert cache.add("e1", prepared) == []
    (root / "cache/built/half").mkdir()
    later = EnvironmentCache(root / "cache", 2**30)
    later.adopt()
    assert later.find("e1") == prepared
    assert sorted(path.name for path in (root / "cache/built").iterdir()) == ["e1", "e1.json"]
    shutil.rmtree(root / "cache/built/e1")
    assert later.find("e1") is None
    assert EnvironmentCache(root / "none", 1).items() == {}


def test_a_full_cache_removes_what_was_used_longest_ago_and_no_run_uses(root: Path) -> None:
    cache, run = EnvironmentCache(root / "cache", 100), RunKey("t", 1, 0)
    cache.open()
    removed = []
    for number, key in enumerate(("e1", "e2", "e3")):
        cache.place(key, "acme").target.mkdir()
        removed += cache.add(key, Interpreter(PYTHON, size_bytes=40))
        os.utime(root / f"cache/built/{key}.json", (number, number))
        if key == "e1":
            cache.use("e1", run)
            os.utime(root / "cache/built/e1.json", (0, 0))
    assert removed == ["e2"]
    assert not (root / "cache/built/e2").exists()
    cache.leave(run)
    assert cache.add("e4", Interpreter(PYTHON, size_bytes=40)) == ["e1"]


def test_a_cache_in_a_directory_of_another_user_is_refused(root: Path) -> None:
    (root / "link").symlink_to(root)
    with pytest.raises(PermissionError, match="belongs to another user"):
        EnvironmentCache(root / "link", 1).open()


def test_the_user_that_builds_is_none_that_runs_tasks() -> None:
    if os.geteuid() == 0:
        with pytest.raises(CannotPrepare, match="build_user is nobody, as whom tasks run too"):
            build_user(BuildRules(build_user="nobody"), "nobody")
        assert build_user(BuildRules(build_user="daemon"), "nobody") != ProcessUser()
    assert build_user(BuildRules(), "") == ProcessUser()


def test_settings_reach_uv_as_variables_and_nothing_else_of_the_node_does(root: Path) -> None:
    place = EnvironmentCache(root, 1).place("e1", "acme")
    rules = BuildRules(
        index_url="https://index", extra_index_urls=("https://more",), offline=True, download_python=True,
        python_path=("/opt/python/bin",),
    )  # fmt: skip
    env = env_of(rules, place, {"PATH": "/bin", "https_proxy": "http://proxy", "WANDB_API_KEY": "key"})
    assert env["PATH"] == "/opt/python/bin:/bin"
    assert (env["UV_DEFAULT_INDEX"], env["UV_INDEX"]) == ("https://index", "https://more")
    assert (env["UV_OFFLINE"], env["UV_PYTHON_DOWNLOADS"], env["https_proxy"]) == (
        "1",
        "automatic",
        "http://proxy",
    )
    assert "WANDB_API_KEY" not in env


def test_a_project_is_synced_by_its_lock_and_without_itself(root: Path) -> None:
    place = EnvironmentCache(root, 1).place("e1", "acme")
    [sync] = commands_of(Environment(python="3.12", project="a" * 64), place, "/uv")
    assert sync[:4] == ("/uv", "sync", "--frozen", "--no-install-project")
    assert sync[-2:] == ("--python", "3.12")
    [make] = commands_of(Environment(python="3.12"), place, "/uv")
    assert make[1] == "venv"


def test_a_project_without_its_two_files_is_refused(root: Path) -> None:
    cache = EnvironmentCache(root, 1)
    cache.open()
    with pytest.raises(CannotPrepare, match="cannot be unpacked"):
        lay_out(Environment(project="a" * 64), b"no archive", cache.place("e1", "acme"), ProcessUser())


async def test_a_build_that_takes_too_long_is_killed_with_all_that_it_started() -> None:
    program = ("sh", "-c", "echo begun; sleep 60 & sleep 60")
    lines: list[str] = []
    ended = await run_limited(
        program, {"PATH": os.defpath}, "/", ProcessUser(), ProcessLimits(4096, 0.5), lines.append
    )
    assert ended.code == -9
    assert lines == ["begun\n", "error: it did not end within 0.5 s and was killed\n"]


async def test_a_build_has_no_more_memory_than_its_limit() -> None:
    program = (sys.executable, "-c", "bytearray(400 * 2**20)")
    ended = await run_limited(program, {}, "/", ProcessUser(), ProcessLimits(100, 60.0))
    assert "MemoryError" in ended.output


async def test_a_program_that_cannot_be_started_is_named() -> None:
    ended = await run_limited(("/no/such",), {}, "/", ProcessUser(), LIMITS)
    assert ended.output == "/no/such cannot be started: No such file or directory\n"


async def test_interpreters_and_conda_environments_of_the_node_are_found(root: Path) -> None:
    about: Any = ((str(root),), "", ProcessUser(), "n1")
    own = await find_interpreter(Environment(python=sys.prefix), *about)
    assert (own.python, own.prefix) == (PYTHON, sys.prefix)
    (root / "envs/r/conda-meta").mkdir(parents=True)
    assert await find_interpreter(Environment(conda="r"), *about) == Interpreter(prefix=f"{root}/envs/r")
    (root / "envs/r/bin").mkdir()
    (root / "envs/r/bin/python").symlink_to(sys.executable)
    found = await find_interpreter(Environment(conda=f"{root}/envs/r"), *about)
    assert found.python == PYTHON


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"python": "/nowhere/python"}, "there is no /nowhere/python on node n1; name an interpreter"),
        ({"python": "/bin/true"}, "/bin/true on node n1 is no Python"),
        ({"conda": "absent"}, 'no conda environment "absent" on node n1'),
    ],
)
async def test_an_interpreter_that_is_none_is_refused_with_a_remedy(fields: Any, said: str) -> None:
    with pytest.raises(CannotPrepare, match=said):
        await find_interpreter(Environment(**fields), ("/none",), "", ProcessUser(), "n1")


def test_what_is_brought_along_is_copied_once_and_readable_for_all(root: Path) -> None:
    brought = Brought(root)
    functions = Path(brought.for_functions())
    assert sorted(path.name for path in functions.iterdir()) == ["cloudpickle", "gpubroker"]
    assert brought.for_functions() == str(functions)
    assert [path.name for path in Path(Brought(root).for_commands()).iterdir()] == ["gpubroker"]
    assert all(path.stat().st_mode & 0o004 for path in functions.rglob("*"))


RUN = ContainerRun(
    "gpubroker-t-1-0", "/runs/t", "65534:65534", ("GPU-a",), ("/data",), ("RANK", "GPUBROKER_RUN")
)


def test_podman_runs_a_command_with_directory_gpus_data_and_mark() -> None:
    words = container_words("/usr/bin/podman", "python:3.12", RUN)
    assert words[:3] == ("/usr/bin/podman", "run", "--rm")
    assert words[-1] == "python:3.12"
    text = " ".join(words)
    for part in (
        "--cgroups=disabled", "--user 65534:65534", "--workdir /runs/t", "--volume /runs/t:/runs/t",
        "--volume /data:/data", "--device nvidia.com/gpu=GPU-a", "--env GPUBROKER_RUN",
    ):  # fmt: skip
        assert part in text


def test_docker_and_apptainer_have_their_own_words() -> None:
    docker = container_words("/usr/bin/docker", "python:3.12", RUN)
    assert "--cgroups=disabled" not in docker
    bare = RUN._replace(directory="", user="", gpus=(), mounts=(), variables=())
    assert "--workdir" not in container_words("docker", "python:3.12", bare)
    apptainer = container_words("/usr/bin/apptainer", "python:3.12", RUN)
    assert apptainer[:3] == ("/usr/bin/apptainer", "exec", "--no-home")
    assert apptainer[-4:] == ("--pwd", "/runs/t", "--nv", "docker://python:3.12")
    assert container_words("apptainer", "/images/a.sif", bare)[-1] == "/images/a.sif"


async def test_an_engine_that_the_node_lacks_is_named() -> None:
    rules = BuildRules(container_engine="apptainer")
    with pytest.raises(CannotPrepare, match="node n1 has no program apptainer"):
        await fetch_image("python:3.12", rules, "n1")
