"""Environments of runs: the interpreter and the packages that a run uses, and their state on a node."""

import re
from collections.abc import Iterator
from enum import StrEnum
from hashlib import sha256

from gpubroker.wire.environments import Environment as ShownEnvironment
from msgspec import Struct, json
from msgspec.structs import replace

from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.units import Instant

ENVIRONMENT_FAILED = "environment"
"""Failure kind of a task whose environment could not be prepared on any node."""
KEY_CHARS = 32
MESSAGE_CHARS = 4096
MOST_REQUIREMENTS = 1000
REQUIREMENT_CHARS = 2000
_VERSION = re.compile(r"\d{1,2}\.\d{1,3}(\.\d{1,3})?")
_SPECIFIER = re.compile(r"\s*(~=|==|!=|<=|>=|<|>)\s*[0-9.*]+(\s*,\s*(~=|==|!=|<=|>=|<|>)\s*[0-9.*]+)*\s*")
_CONDA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._:/@-]{0,499}")


class EnvironmentKind(StrEnum):
    NAMED = "named"
    """An environment of the operator's settings that is not looked up yet."""
    INTERPRETER = "interpreter"
    """A Python or a conda environment that exists on the nodes."""
    BUILT = "built"
    """Packages that each node installs into an environment of its own."""
    CONTAINER = "container"


class Environment(ShownEnvironment, frozen=True, omit_defaults=True):
    """The environment that a submission or a setting asks for. One that has only a name is that of the
    operator's settings, whose fields are filled in at submit."""

    @property
    def kind(self) -> EnvironmentKind:
        if self.container:
            return EnvironmentKind.CONTAINER
        if self.conda or self.python.startswith("/"):
            return EnvironmentKind.INTERPRETER
        if self.python or self.requirements or self.project:
            return EnvironmentKind.BUILT
        return EnvironmentKind.NAMED

    @property
    def minor(self) -> str:
        """The minor version of Python, such as `3.12`; empty if only a node can tell it."""
        is_exact = _VERSION.fullmatch(self.python) is not None
        return ".".join(self.python.split(".")[:2]) if is_exact else ""

    @property
    def label(self) -> str:
        """A short text that tells people which environment this is."""
        if self.name:
            return self.name
        if self.project:
            return f"project {self.project[:12]}"
        if self.requirements:
            first, more = self.requirements[0], len(self.requirements) - 1
            return f"{first} and {more} more" if more else first
        return self.container or self.conda or f"Python {self.python}"

    def faults(self) -> Iterator[Refusal]:
        """Yield a refusal for each field that is wrong. `Refusal.field` is the name of the field."""
        if self.kind is EnvironmentKind.NAMED and not self.name:
            yield Refusal("empty-environment", f"names nothing; give one of {_KINDS}", "")
        given = [field for field in _KINDS_OF_THEIR_OWN if getattr(self, field)]
        given += ["python"] if self.python.startswith("/") else []
        given += ["requirements"] if self.requirements else []
        if self.name and (given or self.python):
            detail = "names an environment of the operator, which has all its fields; leave the others out"
            yield Refusal("contradiction", detail, "name")
        elif len(given) > 1:
            detail = f"has {' and '.join(given)}, and a run has one environment; give one of them"
            yield Refusal("contradiction", detail, given[1])
        elif given and given[0] in ("conda", "container") and self.python:
            detail = f"has {given[0]}, which has a Python of its own; leave python out"
            yield Refusal("contradiction", detail, "python")
        if self.python and not _is_python(self.python):
            detail = (
                f'"{self.python[:100]}" is neither an absolute path on the nodes, such as '
                "/opt/venv/bin/python, nor a version, such as 3.12 or >=3.11"
            )
            yield Refusal("invalid-python", detail, "python")
        if self.conda and not self.conda.startswith("/") and _CONDA_NAME.fullmatch(self.conda) is None:
            detail = f'"{self.conda[:100]}" is neither the name of a conda environment nor an absolute path'
            yield Refusal("invalid-conda", detail, "conda")
        if self.container and _IMAGE.fullmatch(self.container) is None:
            detail = f'"{self.container[:100]}" is no image name, such as docker.io/library/python:3.12'
            yield Refusal("invalid-container", detail, "container")
        yield from self._faulty_requirements()

    def _faulty_requirements(self) -> Iterator[Refusal]:
        for number, requirement in enumerate(self.requirements):
            if why := _why_no_requirement(requirement):
                detail = f'"{requirement[:100]}" {why}'
                yield Refusal("invalid-requirement", detail, f"requirements/{number}")
        if len(self.requirements) > MOST_REQUIREMENTS:
            detail = (
                f"has {len(self.requirements)} lines, and may have {MOST_REQUIREMENTS}; lock them: uv.lock"
            )
            yield Refusal("too-many-requirements", detail, "requirements")


_KINDS_OF_THEIR_OWN = ("conda", "container", "project")
_KINDS = "python, conda, requirements, project, container"


def _is_python(text: str) -> bool:
    if text.startswith("/"):
        return "\0" not in text and "\n" not in text
    return bool(_VERSION.fullmatch(text) or _SPECIFIER.fullmatch(text))


def _why_no_requirement(line: str) -> str:
    """Return why this is no requirement that nodes install; empty if it is one."""
    if not line.strip() or len(line) > REQUIREMENT_CHARS or any(ord(letter) < 32 for letter in line):
        return f"is not one line of 1 to {REQUIREMENT_CHARS} characters"
    if line.lstrip().startswith("-"):
        return (
            "is an option; write each package on a line of its own, and leave the index to the operator "
            "(environments.index_url)"
        )
    if line.lstrip().startswith((".", "/", "~")) or re.search(r"(^|@|\s)\s*file:", line):
        return (
            "is a path, and packages come from an index; send the directory with the task (--upload), or use "
            "a wheel at an https address"
        )
    return ""


def environment_key(environment: Environment, tenant: str) -> str:
    """Return the text that names an environment on the nodes. Equal environments of a tenant have one key;
    with an empty tenant, all tenants share it."""
    content = json.encode((tenant, replace(environment, name="")))
    return sha256(content).hexdigest()[:KEY_CHARS]


class EnvironmentState(StrEnum):
    PREPARING = "preparing"
    READY = "ready"
    FAILED = "failed"


class NodeEnvironment(Struct, frozen=True, omit_defaults=True):
    """The state of one environment on one node."""

    key: str
    state: EnvironmentState
    since: Instant
    """The time when the preparation was ordered or, for a failed one, when it failed."""
    step: str = ""
    """What the node does at present, in words that follow "node is"."""
    python: str = ""
    """The minor version of its Python, once it is ready."""
    message: str = ""
    """Why the preparation failed."""
