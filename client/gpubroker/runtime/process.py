"""Give this process to one run: its devices, environment, directory, user and rendezvous port."""

import ctypes
import os
import pwd
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gpubroker.runtime.messages import RunOrder

RUN_MARK = "GPUBROKER_RUN"
"""The run's key in the environment of every process that it starts; leftovers are found by it."""

INSTANCE_MARK = "GPUBROKER_INSTANCE"
"""The broker of the run: several may share a machine."""

NODE_MARK = "GPUBROKER_NODE"
"""The node of the run: several may be on one machine."""

NICENESS = 5
"""Of a run: on a busy machine the agent and the service get the CPU first."""

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """What a process gets besides its order."""

    instance: str
    user: str = ""
    """System user to become; empty keeps the service's own."""
    host: str = ""
    """Where other nodes reach this one, for a run that is one of several ranks."""
    node: str = ""


def hide_devices() -> None:
    """Until a run comes, no library in this process may see a GPU, and so use its memory."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def look_for_modules_in(directories: Sequence[str]) -> None:
    """Put the operator's directories first in `sys.path`."""
    sys.path[:0] = [path for path in directories if path not in sys.path]


def take_process(order: RunOrder, given: ProcessSetup) -> None:
    """Once per process, before user code. Raises OSError or KeyError if a part of it is refused."""
    os.environ.update(order.env)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(uuid for uuid, _mb in order.leases)
    os.environ[RUN_MARK] = str(order.key)
    os.environ[INSTANCE_MARK] = given.instance
    os.environ[NODE_MARK] = given.node
    os.environ["GPUBROKER_TASK"] = order.task
    os.environ["GPUBROKER_ATTEMPT"] = str(order.attempt)
    if order.barrier:
        os.environ |= place_among_ranks(order)
    os.nice(NICENESS)
    adopt_orphans()
    if given.user:
        become(given.user)
    if order.working_directory:
        os.chdir(order.working_directory)


def place_among_ranks(order: RunOrder) -> dict[str, str]:
    """The variables of libraries for distributed work.

    Each rank sees only its own devices, numbered from 0. So each has local rank 0, even if several are on the
    node: `torch.cuda.set_device(LOCAL_RANK)` is right.
    """
    ranks = {"RANK": order.rank, "WORLD_SIZE": order.world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    return {name: str(number) for name, number in ranks.items()}


def adopt_orphans() -> None:
    """A descendant becomes a child of this process when its parent ends, so none leaves its tree."""
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


class RendezvousPort:
    """A port of this node where the ranks of a task meet, reserved until this rank listens on it."""

    def __init__(self, host: str) -> None:
        """`host` is where other nodes reach this one. Raises OSError if there is no free port."""
        self._host = f"[{host}]" if ":" in host else host
        # Bound and not listening: no other process gets the port, and nothing can connect to it.
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.bind(("", 0))

    @property
    def address(self) -> str:
        return f"{self._host}:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        """Free the port for the code of the run."""
        self._socket.close()


def announce_rendezvous(address: str) -> None:
    """Set the variables in which libraries for distributed work look for it, for child processes too."""
    host, _, port = address.rpartition(":")
    os.environ["MASTER_ADDR"] = host.strip("[]")
    os.environ["MASTER_PORT"] = port
