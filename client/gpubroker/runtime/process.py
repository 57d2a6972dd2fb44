"""Give this process to one run: its devices, environment, directory, user and rendezvous port."""

import ctypes
import errno
import json
import os
import pwd
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpubroker.runtime.messages import RunOrder
from gpubroker.runtime.site.gpubroker_memory_limit import FRACTIONS, LIMITS_MB, limit_torch

RUN_MARK = "GPUBROKER_RUN"
"""The variable with the run's key, which every process that the run starts inherits. Leftover processes are
found by it."""

INSTANCE_MARK = "GPUBROKER_INSTANCE"
"""The variable with the id of the run's broker, because several brokers may share a machine."""

RAY_VARIABLE = "GPUBROKER_RAY"
"""The variable that says which Ray cluster the run asks for: private or shared."""

NODE_MARK = "GPUBROKER_NODE"
"""The variable with the run's node, because several nodes may be on one machine."""

KEPT_ENV = frozenset({"HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONPATH"}) | frozenset(
    {"SHELL", "TERM", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV"}
)
"""The variables of its node's environment that a run's process keeps, besides LC_* and those that the
operator names."""

_OF_THE_CLUSTER = frozenset({"RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"})
"""The variables by which the node's processes know their Ray. No run inherits them, even if the operator
names them."""

_OF_PYTHON = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV")
"""The variables that lead to the Python and the packages of the service; no run in another environment
inherits them."""

_DEFAULT_ENV = {"LOG_LEVEL": "INFO", "RANK": "0", "WORLD_SIZE": "1"}

_SITE = Path(__file__).with_name("site")
"""The directory that is put on the PYTHONPATH of a run with a share of a GPU."""

_MPS_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108  # CUDA's own default

_ENV_START = 47
"""The number of the word, counted after the name in /proc/self/stat, with the start of the environment. The
word after it has the end."""

NICENESS = 5
"""The niceness of a run, so that the agent and the service get the CPU first on a busy machine."""

OBJECT_STORE_SHARE = 0.3
"""The share of the host memory for objects, as in Ray itself."""
LEAST_OBJECT_STORE_MB = 75
"""Ray refuses less."""

_PR_SET_CHILD_SUBREAPER = 36


class NoDirectory(Exception):
    """The run cannot work in the directory that it names; the text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """The data that a process gets besides its order."""

    instance: str
    user: str = ""
    """The system user to become; empty keeps the service's own."""
    host: str = ""
    """The address at which other nodes reach this one, for a run that is one of several ranks."""
    node: str = ""


def is_kept(name: str, inherited: Iterable[str]) -> bool:
    """True if a run may have this variable of its node. `inherited` are the variables that the operator
    names."""
    return name in KEPT_ENV or name.startswith("LC_") or name in inherited


def settle_environment(inherited: Iterable[str], given: Mapping[str, str]) -> None:
    """Remove the variables that are not for runs from this process's environment, and add `given`. Called
    before any user code.

    Other people started the nodes of a joined cluster, with whatever variables their shell had.
    """
    kept = {name for name in os.environ if is_kept(name, inherited) and name not in _OF_THE_CLUSTER}
    for name in os.environ.keys() - kept:
        del os.environ[name]
    _erase_initial_environment(kept)
    os.environ.update({**_DEFAULT_ENV, **_ray_of_its_own(), **given})


def _ray_of_its_own() -> dict[str, str]:
    """Return variables with which `ray.init()` in a child process starts a Ray of its own, whatever runs on
    the machine.

    Otherwise it would look for the address of a running one in /tmp/ray and among all processes. The token is
    only for the new Ray: without it, Ray would use or make the token in the user's home.
    """
    return {"RAY_ADDRESS": "local", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _erase_initial_environment(kept: Iterable[str]) -> None:
    """Erase the environment with which the process was started, since /proc/<pid>/environ shows it regardless
    of later changes."""
    words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    address, end = int(words[_ENV_START]), int(words[_ENV_START + 1])
    names = {os.fsencode(name) for name in kept}
    # The C library still reads the kept variables in this place.
    for item in ctypes.string_at(address, end - address).split(b"\0") if address else ():
        if item.partition(b"=")[0] not in names:
            ctypes.memset(address, 0, len(item))
        address += len(item) + 1


def hide_devices() -> None:
    """Hide the GPUs until a run comes, so that no library in this process sees a GPU and uses its memory."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def look_for_modules_in(directories: Sequence[str]) -> None:
    """Put the operator's directories first in `sys.path`."""
    sys.path[:0] = [path for path in directories if path not in sys.path]


def take_process(order: RunOrder, setup: ProcessSetup) -> None:
    """Make this the process of a run. Called once, before user code. Raises OSError or KeyError if the system
    refuses a step, and NoDirectory."""
    if order.environment:
        variables = enter_environment(order, os.environ)
        for name in _OF_PYTHON:
            os.environ.pop(name, None)
        os.environ |= variables
    os.environ.update(order.env)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(uuid for uuid, _mb in order.leases)
    os.environ[RUN_MARK] = str(order.key)
    os.environ[INSTANCE_MARK] = setup.instance
    os.environ[NODE_MARK] = setup.node
    os.environ["GPUBROKER_TASK"] = order.task
    os.environ["GPUBROKER_ATTEMPT"] = str(order.attempt)
    if order.resume_uri is not None:
        os.environ["GPUBROKER_RESUME_URI"] = order.resume_uri
    if order.kind == "command" and order.cpu is not None:
        os.environ["RAY_OVERRIDE_RESOURCES"] = json.dumps(resources_of_own_ray(order))
    if order.barrier and RAY_VARIABLE not in order.env:
        os.environ |= place_among_ranks(order)
    if FRACTIONS in order.env:
        os.environ |= memory_limits(order, os.environ)
        limit_torch(order.env[FRACTIONS])
    os.nice(NICENESS)
    adopt_orphans()
    if setup.user:
        become(setup.user)
    if order.working_directory:
        _enter(order.working_directory, setup)
    if order.upload:
        sys.path.insert(0, order.working_directory)


def enter_environment(order: RunOrder, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which programs of the run find the run's environment first."""
    if not order.interpreter and not order.prefix:
        return {}
    directories = [f"{order.prefix}/bin"] if order.prefix else []
    if order.interpreter and not order.prefix:
        directories = [os.path.dirname(order.interpreter)]  # a string is wanted
    variables = {"PATH": os.pathsep.join([*directories, env.get("PATH", os.defpath)])}
    if order.prefix:
        is_conda = os.path.isdir(f"{order.prefix}/conda-meta")
        variables["CONDA_PREFIX" if is_conda else "VIRTUAL_ENV"] = order.prefix
    if order.brought and order.kind == "command":
        variables["PYTHONPATH"] = order.brought
    return variables


def _enter(directory: str, setup: ProcessSetup) -> None:
    """Change to the directory of the run. Raises NoDirectory if that is not possible."""
    try:
        os.chdir(directory)
    except OSError as fault:
        node = f"node {setup.node}" if setup.node else "its node"
        user = f"user {setup.user}" if setup.user else "the user of the service"
        problem = {
            errno.ENOENT: "does not exist there",
            errno.ENOTDIR: "is not a directory there",
            errno.EACCES: f"cannot be entered there by {user}, as whom tasks run",
        }.get(fault.errno or 0, f"cannot be entered there: {fault.strerror}")
        raise NoDirectory(
            f"the command was to run on {node} in {directory}, which {problem}; name a directory that every "
            "node has (--dir DIR), send yours with the task (--upload DIR), or name a node that has it "
            "(--on node=NAME)"
        ) from None


def memory_limits(order: RunOrder, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make libraries keep to the lease. Variables that the task itself sets win
    over them.

    `env` is the environment without them.
    """
    limits = {"PYTHONPATH": os.pathsep.join([str(_SITE), *filter(None, [env.get("PYTHONPATH")])])}
    # JAX refuses to start with both of its names for this.
    if not {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & order.env.keys():
        limits["XLA_PYTHON_CLIENT_MEM_FRACTION"] = min(order.env[FRACTIONS].split(","), key=float)
    if (Path(env.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_DIRECTORY)) / "control").exists():
        sizes = (f"{number}={mb}M" for number, mb in enumerate(order.env[LIMITS_MB].split(",")))
        limits["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(sizes)
    return limits


def resources_of_own_ray(order: RunOrder) -> dict[str, float]:
    """Return the resources of a Ray that the command of a run starts itself. Ray would take all CPUs of the
    machine otherwise.

    Ray counts whole CPUs and needs one for any work, so a run with less than one CPU gets one.
    """
    resources: dict[str, float] = {"CPU": max(1, int(order.cpu or 0)), "GPU": len(order.leases)}
    if order.memory_mb:
        store_mb = object_store_mb(order.memory_mb)
        resources["object_store_memory"] = store_mb * 2**20
        resources["memory"] = max(0, order.memory_mb - store_mb) * 2**20
    return resources


def object_store_mb(memory_mb: int) -> int:
    """Return the part of a run's host memory that its Ray uses for objects."""
    return max(LEAST_OBJECT_STORE_MB, int(OBJECT_STORE_SHARE * memory_mb))


def place_among_ranks(order: RunOrder) -> dict[str, str]:
    """Return the variables that libraries for distributed work read.

    Each rank sees only its own devices, numbered from 0. So each has local rank 0, even if several are on the
    node: `torch.cuda.set_device(LOCAL_RANK)` is right.
    """
    ranks = {"RANK": order.rank, "WORLD_SIZE": order.world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    return {name: str(number) for name, number in ranks.items()}


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process, so that none leaves its process tree."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def become(user: str) -> None:
    """Drop root for good: groups first, user last."""
    entry = pwd.getpwnam(user)
    os.initgroups(user, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)
    os.environ |= {"HOME": entry.pw_dir, "USER": user, "LOGNAME": user}
    tempfile.tempdir = None  # this user may write elsewhere


class RendezvousPort:
    """A port of this node where the ranks of a task meet, reserved until this rank listens on it."""

    def __init__(self, host: str) -> None:
        """`host` is the address at which other nodes reach this one. Raises OSError if there is no free
        port."""
        self._host = f"[{host}]" if ":" in host else host
        # Bound but not listening, so that no other process gets the port and nothing can connect to it.
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.bind(("", 0))

    @property
    def address(self) -> str:
        return f"{self._host}:{self._socket.getsockname()[1]}"

    def listen(self) -> socket.socket:
        """Return a socket that listens on the port."""
        self._socket.listen()
        return self._socket

    def close(self) -> None:
        """Free the port for the code of the run."""
        self._socket.close()


def announce_rendezvous(address: str) -> None:
    """Set the variables in which libraries for distributed work, also in child processes, look for the
    address."""
    host, _, port = address.rpartition(":")
    os.environ["MASTER_ADDR"] = host.strip("[]")
    os.environ["MASTER_PORT"] = port
