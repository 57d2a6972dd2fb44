"""The directory in which a command runs: that of the user's shell, if this machine is one of the nodes."""

import os
import pwd
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpubroker.cli.lookup import is_of_this_machine
from gpubroker.cli.printing import eprint
from gpubroker.errors import Refused, WrongArgument

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.tasks.submission import SubmitOptions
    from gpubroker.wire.nodes import Node

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ACCESS_LIST = "system.posix_acl_access"
_FIRST_NODE_SECONDS = 60.0
"""The longest wait for the first node of a service that has just started."""
_POLL_SECONDS = 0.25


def place_of(
    broker: "Broker", target: str | Sequence[str] | None, options: "SubmitOptions"
) -> "SubmitOptions":
    """Return the option that makes a command run in this process's directory; no option if the user says
    where it runs, or if no node is on this machine. Raises WrongArgument if the tasks' user cannot enter the
    directory.

    The boot id proves that client and node are one machine: a tunnel to a service elsewhere looks local too.
    """
    if target is None or isinstance(target, str) or {"working_directory", "upload"} & options.keys():
        return {}
    try:
        here, boot_id = os.getcwd(), _BOOT_ID.read_text(encoding="ascii").strip()
        [node, *_] = _nodes_here(broker, boot_id)
    except (OSError, ValueError, Refused):
        return {}  # this is not Linux or not a node, or the token may not see nodes
    if (closed := closed_part(Path(here), node.task_user)) is not None:
        raise WrongArgument(
            f"{here} cannot be the directory of the task: tasks run as user {node.task_user}, who may not "
            f"enter {closed}; send the directory with the task (--upload), name one that this user may enter "
            f"(--dir DIR), or give the right: chmod o+x {closed}"
        )
    return {"working_directory": here}


def _nodes_here(broker: "Broker", boot_id: str) -> Sequence["Node"]:
    """Return the nodes on this machine. A service of this machine that has no node at all has just started:
    its first node is waited for."""
    nodes = broker.nodes(history="0", boot_id=boot_id).items
    if nodes or not is_of_this_machine(broker):
        return nodes
    if not broker.nodes(history="0").items:
        eprint("the service has no node yet; waiting for the first, to see whether this machine is one")
        until = time.monotonic() + _FIRST_NODE_SECONDS
        while time.monotonic() < until and not broker.nodes(history="0").items:
            time.sleep(_POLL_SECONDS)
    # The first node may have come between the two questions above.
    return broker.nodes(history="0", boot_id=boot_id).items


def closed_part(directory: Path, user: str) -> Path | None:
    """Return the first part of the path whose mode does not let this user enter it; None if there is none, or
    if this process cannot tell: then the run will report it."""
    try:
        account = pwd.getpwnam(user)
        groups = os.getgrouplist(user, account.pw_gid)
        for part in [*reversed(directory.parents), directory]:
            status = part.stat()
            if account.pw_uid == status.st_uid:
                enters = status.st_mode & 0o100
            elif status.st_gid in groups:
                enters = status.st_mode & 0o010
            else:
                enters = status.st_mode & 0o001
            if not enters and account.pw_uid and not _has_access_list(part):
                return part
    except (KeyError, OSError):
        return None
    return None


def _has_access_list(part: Path) -> bool:
    """True if a POSIX ACL grants or denies more than the mode."""
    try:
        return bool(os.getxattr(part, _ACCESS_LIST))
    except OSError:
        return False
