"""The environment of a submission: by name, as fields, or read from a file that Python's tools know."""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpubroker.errors import WrongArgument
from gpubroker.runtime.objects import ObjectRef

LOCK, PROJECT = "uv.lock", "pyproject.toml"
_FILES = (".txt", ".toml", ".lock", ".py")
_SCRIPT = re.compile(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$")
"""The block of PEP 723 in which a script states its requirements."""
_FIELDS = ("python", "conda", "requirements", "project", "container")


def project_to_store(given: Any) -> Path | None:
    """Return the directory with the pyproject.toml and uv.lock that must be stored as an object first; None
    if the environment has none."""
    if isinstance(given, Mapping):
        given = given.get("project")
    if isinstance(given, ObjectRef) or not _is_file(given):
        return None
    directory = _project_directory(Path(given))
    return directory if directory is not None and (directory / LOCK).is_file() else None


def with_project(given: Any, project: ObjectRef) -> Any:
    """Return the environment with the object in place of the project's directory."""
    return {**given, "project": project} if isinstance(given, Mapping) else {"project": project}


def environment_body(given: Any) -> Any:
    """Return the environment in the form of the HTTP API. Files of requirements are read here. Raises
    WrongArgument."""
    if isinstance(given, os.PathLike) or _is_file(given):
        return _read(Path(given))
    if isinstance(given, str):
        return given
    if not isinstance(given, Mapping):
        raise WrongArgument(
            "environment must be the operator's name of one, a file (requirements.txt, pyproject.toml, a "
            f"script), or a mapping of {', '.join(_FIELDS)}; not {given!r}"
        )
    for name in given:
        if name not in _FIELDS:
            raise WrongArgument(f"environment has no field {name!r}; its fields are {', '.join(_FIELDS)}")
    body = dict(given)
    requirements = body.get("requirements")
    if isinstance(requirements, str | os.PathLike):
        body["requirements"] = list(_lines_of(Path(requirements)))
    project = body.pop("project", None)
    if isinstance(project, ObjectRef):
        body["project"] = project.id
    elif project is not None:
        body = {**_read(Path(project)), **body}
    return body


def _is_file(given: Any) -> bool:
    """Return True if the text names a file or a directory, and not an environment of the operator."""
    if isinstance(given, os.PathLike):
        return True
    return isinstance(given, str) and (given.endswith(_FILES) or "/" in given or given in (".", ".."))


def _project_directory(path: Path) -> Path | None:
    if path.is_dir():
        return path
    return path.parent if path.name in (PROJECT, LOCK) else None


def _read(path: Path) -> dict[str, Any]:
    """Return the fields of the environment that a file describes. Raises WrongArgument."""
    directory = _project_directory(path)
    if directory is not None:
        if (directory / LOCK).is_file():
            raise WrongArgument(
                f"{directory} has a {LOCK}, which is sent as an object; name it in submit, not in a body "
                "that is made in advance"
            )
        return _of_project(directory / PROJECT)
    if path.suffix == ".py":
        return _of_script(path)
    return {"requirements": list(_lines_of(path))}


def _of_project(path: Path) -> dict[str, Any]:
    """Return the dependencies of a project that has no lock file."""
    project = _toml(path, _text_of(path)).get("project", {})
    return _fields(project.get("dependencies", []), project.get("requires-python"))


def _of_script(path: Path) -> dict[str, Any]:
    found = _SCRIPT.search(_text_of(path))
    if found is None:
        raise WrongArgument(
            f"{path} has no script metadata (PEP 723); write a block that begins with `# /// script`, or "
            "give requirements"
        )
    text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in found["content"].splitlines())
    stated = _toml(path, text)
    return _fields(stated.get("dependencies", []), stated.get("requires-python"))


def _fields(requirements: list[str], python: str | None) -> dict[str, Any]:
    return {"requirements": requirements} | ({"python": python} if python else {})


def _lines_of(path: Path, depth: int = 0) -> Iterator[str]:
    """Yield the requirements of a requirements.txt and of the files that it includes. Raises WrongArgument
    for options that the service does not take."""
    for line in re.sub(r"\\\r?\n", " ", _text_of(path)).splitlines():
        line = re.sub(r"(^|\s)#.*$", "", line).strip()
        if not line:
            continue
        option, _, value = line.partition(" ")
        if option in ("-r", "--requirement") and depth < 10:
            yield from _lines_of(path.parent / value.strip(), depth + 1)
        elif line.startswith("-"):
            raise WrongArgument(
                f"{path}: the option {option} is not sent; the operator sets the package index "
                "(environments.index_url), and local packages travel with --upload"
            )
        else:
            yield line


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as fault:
        why = fault.strerror if isinstance(fault, OSError) else "it is not UTF-8"
        raise WrongArgument(f"the environment's file {path} cannot be read: {why}") from None


def _toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise WrongArgument(f"{path} cannot be read: {fault}") from None
