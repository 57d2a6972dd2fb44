"""Builds environments with uv: packages by requirement, or a project by its uv.lock.

uv runs in a process of its own, as a user that no task runs as, because a package may run code when it is
installed.
"""

import contextlib
import io
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from gpubroker.runtime.archives import ArchiveLimits, BadArchive, unpack

from gpubroker_server.adapters.environments.interpreters import CannotPrepare, Interpreter, probe
from gpubroker_server.adapters.environments.processes import (
    ProcessLimits,
    ProcessUser,
    ProgramEnd,
    run_limited,
)
from gpubroker_server.core.domain.environment import Environment
from gpubroker_server.core.domain.environment_builds import retry_pause, step_after, why_failed
from gpubroker_server.settings.environments import BuildRules

BUILD_UID = 64_990
"""The user and group id that build if the node runs as root, tasks do not, and no user is set. No account has
it, so no task runs as this user."""
PROJECT_LIMITS = ArchiveLimits(16 * 2**20, 1000)
_PASSED_ON = frozenset(
    {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR", "TZ", "LANG"}
)
"""The variables of the node that builds inherit, in upper or lower case."""
NO_UV = (
    "uv, which installs packages, is missing beside the Python of node {node}; install gpubroker-server[ray] "
    "there with its dependencies"
)
Wait = Callable[[float], "object"]


class BuildDirectories(NamedTuple):
    """The directories of one build. The user that builds owns all but `above`."""

    target: Path
    """The directory of the environment, in its final place: scripts in it contain its path."""
    project: Path
    """The directory of the files that the build reads."""
    cache: Path
    """uv's cache of downloaded packages."""


def uv_program() -> str | None:
    """Return the path of uv's program; None if it is not installed."""
    try:
        from uv import find_uv_bin  # a wheel that contains the program
    except ImportError:
        return shutil.which("uv")
    with contextlib.suppress(FileNotFoundError):
        return str(find_uv_bin())
    return shutil.which("uv")


def build_user(rules: BuildRules, task_user: str) -> ProcessUser:
    """Return the user that builds: one that no task runs as, if the node runs as root and tasks do not.
    Raises CannotPrepare, and KeyError if the settings name a user that does not exist."""
    if os.geteuid() != 0 or task_user in ("", "root"):
        return ProcessUser()  # tasks may do what this user may, so a build may too
    if rules.build_user == task_user:
        raise CannotPrepare(
            f"environments.build_user is {task_user}, as whom tasks run too, so that one task could change "
            "the packages of others; set it to another user, or leave it out"
        )
    return ProcessUser.named(rules.build_user) if rules.build_user else ProcessUser(BUILD_UID, BUILD_UID)


def commands_of(environment: Environment, place: BuildDirectories, uv: str) -> list[tuple[str, ...]]:
    """Return the programs that build an environment, in order."""
    if environment.project:
        python = ("--python", environment.python) if environment.python else ()
        return [(uv, "sync", "--frozen", "--no-install-project", "--no-install-workspace", *python)]
    target = str(place.target)
    make = (uv, "venv", "--no-project", "--python", environment.python, target)
    if not environment.requirements:
        return [make]
    requirements = str(place.project / "requirements.txt")
    return [make, (uv, "pip", "install", "--python", target, "-r", requirements)]


def env_of(rules: BuildRules, place: BuildDirectories, node_env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a build."""
    path = os.pathsep.join([*rules.python_path, node_env.get("PATH", os.defpath)])
    kept = {name: text for name, text in node_env.items() if name.upper() in _PASSED_ON}
    env = {
        **kept,
        "PATH": path,
        "HOME": str(place.cache),
        "UV_CACHE_DIR": str(place.cache / "uv"),
        "UV_PYTHON_INSTALL_DIR": str(place.cache / "python"),
        "UV_PYTHON_DOWNLOADS": "automatic" if rules.download_python else "never",
        "UV_PROJECT_ENVIRONMENT": str(place.target),
        "UV_SYSTEM_CERTS": "1",  # an index of the operator may have a certificate of its own
        "UV_NO_PROGRESS": "1",
        "NO_COLOR": "1",
    }
    if rules.index_url:
        env["UV_DEFAULT_INDEX"] = rules.index_url
    if rules.extra_index_urls:
        env["UV_INDEX"] = " ".join(rules.extra_index_urls)
    if rules.find_links:
        env["UV_FIND_LINKS"] = ",".join(rules.find_links)
    if rules.offline:
        env["UV_OFFLINE"] = "1"
    return env


def lay_out(environment: Environment, project: bytes, place: BuildDirectories, user: ProcessUser) -> None:
    """Make the directories of a build and write the files that it reads. Raises OSError, and CannotPrepare if
    the archive of a project is not one."""
    shutil.rmtree(place.target, ignore_errors=True)
    shutil.rmtree(place.project, ignore_errors=True)
    for directory, mode in ((place.cache, 0o700), (place.project, 0o700), (place.target, 0o755)):
        directory.mkdir(mode=mode, parents=True, exist_ok=True)
        directory.chmod(mode)
    if environment.project:
        try:
            unpack(io.BytesIO(project), place.project, PROJECT_LIMITS)
        except BadArchive as fault:
            raise CannotPrepare(f"the archive of its project cannot be unpacked: {fault}") from None
        if not (place.project / "pyproject.toml").is_file() or not (place.project / "uv.lock").is_file():
            raise CannotPrepare(
                "its project has no pyproject.toml and uv.lock; run uv lock, and submit it again"
            )
    else:
        lines = "".join(f"{requirement}\n" for requirement in environment.requirements)
        (place.project / "requirements.txt").write_text(lines, encoding="utf-8")
    if user.uid >= 0:
        for directory in (place.cache, place.target):
            os.chown(directory, *user)
        for path in (place.project, *place.project.rglob("*")):
            os.chown(path, *user, follow_symlinks=False)


async def build(
    environment: Environment,
    place: BuildDirectories,
    rules: BuildRules,
    user: ProcessUser,
    node: str,
    on_line: Callable[[str], None],
    on_step: Callable[[str], None],
    pause: Callable[[float], "object"],
) -> Interpreter:
    """Build an environment whose directories are laid out. A failure of the network is tried again after
    `pause`, which is awaited. Raises CannotPrepare."""
    uv = uv_program()
    if uv is None:
        raise CannotPrepare(NO_UV.format(node=node))
    env, failures = env_of(rules, place, os.environ), 0
    for program in commands_of(environment, place, uv):
        while (ended := await _run(program, env, place, rules, user, on_line, on_step)).code != 0:
            failures += 1
            seconds = retry_pause(failures, ended.output)
            if seconds is None:
                raise CannotPrepare(why_failed(("uv", *program[1:]), ended.output, ended.code))
            on_step(f"waiting {seconds:g} s to try again after a failure of the network")
            await pause(seconds)  # type: ignore[misc]  # it is asyncio.sleep
    on_step("about to end")
    return await probe(place.target / "bin/python", user, node)


async def _run(
    program: tuple[str, ...],
    env: Mapping[str, str],
    place: BuildDirectories,
    rules: BuildRules,
    user: ProcessUser,
    on_line: Callable[[str], None],
    on_step: Callable[[str], None],
) -> ProgramEnd:
    on_line(f"$ {' '.join(('uv', *program[1:]))}\n")
    on_step("choosing versions" if program[1] == "pip" else "making its directory")

    def heard(line: str) -> None:
        on_line(line)
        if step := step_after(line):
            on_step(step)

    limits = ProcessLimits(rules.build_memory_mb, rules.build_seconds)
    return await run_limited(program, env, str(place.project), user, limits, heard)


async def compile_packages(prepared: Interpreter, user: ProcessUser, rules: BuildRules) -> None:
    """Compile the packages of an environment, which runs only read. Runs may use it meanwhile, and a failure
    only makes them import more slowly."""
    program = (prepared.interpreter, "-m", "compileall", "-q", f"{prepared.prefix}/lib")
    limits = ProcessLimits(rules.build_memory_mb, rules.build_seconds)
    await run_limited(program, {"PATH": os.defpath}, "/", user, limits)


def size_below(directory: Path) -> int:
    """Return the bytes of all files below a directory. A file that shares its blocks with the cache of
    packages counts too."""
    total = 0
    for path, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_size  # quicker
    return total
