"""Make this process the property of one run: its devices, environment, directory and user."""

import ctypes
import os
import pwd
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gpubroker.runtime.messages import RunOrder

RUN_MARK = "GPUBROKER_RUN"
"""The run's key in the environment of everything that it starts; leftovers are found by it."""

INSTANCE_MARK = "GPUBROKER_INSTANCE"
"""Which broker's run it is: several may share a machine."""

NODE_MARK = "GPUBROKER_NODE"
"""Which node's run it is: several may be on one machine."""

YIELDING = 5
"""Niceness of a run: on a busy machine the agent and the service come first, or nobody could be told."""

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Claim:
    """What a process is given besides its order."""

    instance: str
    user: str = ""
    """System user to become; empty keeps the service's own."""
    host: str = ""
    """Where other nodes reach this one, for a run that is one of several ranks."""
    node: str = ""


def hide_devices() -> None:
    """Until a run comes, no library here may see (and so occupy) a GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def look_for_modules_in(directories: Sequence[str]) -> None:
    """Put the operator's directories before everything else that is imported from."""
    sys.path[:0] = [path for path in directories if path not in sys.path]


def claim(order: RunOrder, given: Claim) -> None:
    """Once per process, before user code. Raises OSError or KeyError if something of it cannot be had."""
    os.environ.update(order.env)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(uuid for uuid, _mb in order.leases)
    os.environ[RUN_MARK] = str(order.key)
    os.environ[INSTANCE_MARK] = given.instance
    os.environ[NODE_MARK] = given.node
    os.environ["GPUBROKER_TASK"] = order.task
    os.environ["GPUBROKER_ATTEMPT"] = str(order.attempt)
    if order.barrier:
        os.environ |= place_among_ranks(order)
    os.nice(YIELDING)
    adopt_orphans()
    if given.user:
        become(given.user)
    if order.working_directory:
        os.chdir(order.working_directory)


def place_among_ranks(order: RunOrder) -> dict[str, str]:
    """What libraries for distributed work look for.

    Each rank sees only devices of its own, numbered from 0. So each is the first of its kind where it is,
    whoever else is on the node: `torch.cuda.set_device(LOCAL_RANK)` is right.
    """
    ranks = {"RANK": order.rank, "WORLD_SIZE": order.world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    return {name: str(number) for name, number in ranks.items()}


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process: none can slip out of its tree."""
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
