"""Interpreters that exist on this node: of a path, of a virtual environment, of a conda environment."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from gpubroker_server.adapters.environments.processes import ProcessLimits, ProcessUser, run_limited
from gpubroker_server.core.domain.environment import Environment

_PROBE = (
    "import json, sys; print(json.dumps([list(sys.version_info[:2]), sys.executable, sys.prefix, "
    "getattr(sys, 'base_prefix', sys.prefix)]))"
)
_PROBE_LIMITS = ProcessLimits(2048, 60.0)
USUAL_CONDA_ROOTS = ("/opt/conda", "/opt/miniconda3", "/opt/miniforge3", "/opt/mambaforge", "/opt/anaconda3")
_CONDA_OF_A_HOME = ("miniconda3", "miniforge3", "mambaforge", "anaconda3", ".conda")


class CannotPrepare(Exception):
    """The environment cannot be prepared on this node; the text says why, and what to do."""


class Interpreter(Struct, frozen=True):
    """A prepared environment, as it is on disk beside the cache and as runs use it."""

    python: str = ""
    """The minor version of its Python; empty if it has none."""
    interpreter: str = ""
    prefix: str = ""
    """The directory of the virtual or conda environment; empty if it is neither."""
    container: tuple[str, ...] = ()
    """The words that run a command in a container."""
    size_bytes: int = 0
    """The size of what was built for it."""


async def find_interpreter(
    environment: Environment, conda_roots: Sequence[str], home: str, user: ProcessUser, node: str
) -> Interpreter:
    """Return the interpreter of an environment that exists on this node. `user` starts it, as runs will.
    Raises CannotPrepare."""
    if environment.conda:
        prefix = _conda_prefix(environment.conda, conda_roots, home, node)
        path = prefix / "bin/python"
        if not _exists(path):
            return Interpreter(prefix=str(prefix))  # for commands only
    else:
        path = _program_in(Path(environment.python))
    return await probe(path, user, node)


async def probe(path: Path, user: ProcessUser, node: str) -> Interpreter:
    """Start an interpreter and return what it says about itself. Raises CannotPrepare."""
    if not _exists(path):
        raise CannotPrepare(
            f"there is no {path} on node {node}; name an interpreter that the node has, a node that has it "
            "(--on node=NAME), or packages to install"
        )
    program = (str(path), "-I", "-c", _PROBE)
    ended = await run_limited(program, {"PATH": os.defpath, "LANG": "C.UTF-8"}, "/", user, _PROBE_LIMITS)
    try:
        (major, minor), executable, prefix, base_prefix = json.loads(ended.output.splitlines()[-1])
    except (ValueError, LookupError, TypeError):
        said = ended.output.strip()[-500:] or f"it ended with exit code {ended.code}"
        message = f"{path} on node {node} is no Python that the tasks' user can start: {said}"
        raise CannotPrepare(message) from None
    is_own = prefix != base_prefix or _exists(Path(prefix, "conda-meta"))
    return Interpreter(f"{major}.{minor}", executable or str(path), prefix if is_own else "")


def _exists(path: Path) -> bool:
    return path.exists()


def _program_in(path: Path) -> Path:
    return path / "bin/python" if path.is_dir() else path


def _conda_prefix(given: str, roots: Sequence[str], home: str, node: str) -> Path:
    if given.startswith("/"):
        candidates = [Path(given)]
    else:
        places = roots or (*USUAL_CONDA_ROOTS, *(f"{home}/{name}" for name in _CONDA_OF_A_HOME if home))
        candidates = [Path(root) if given == "base" else Path(root, "envs", given) for root in places]
    found = next((path for path in candidates if (path / "conda-meta").is_dir()), None)
    if found is None:
        tried = ", ".join(map(str, candidates))
        raise CannotPrepare(
            f'there is no conda environment "{given}" on node {node} (looked at {tried}); create it there, '
            "or have the operator name its installation (environments.conda_roots)"
        )
    return found
