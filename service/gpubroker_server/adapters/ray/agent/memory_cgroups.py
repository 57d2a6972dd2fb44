"""A cgroup for each run that asks for host memory, so that the kernel enforces the limit."""

import contextlib
from pathlib import Path

from gpubroker.runtime.messages import RunKey, RunOrder

from gpubroker_server.adapters.ray.agent.runner_process import REMEDY

CGROUP_FILESYSTEM = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


class MemoryCgroups:
    """Makes cgroups beside the agent's own, if the kernel has cgroups of version 2 with the memory
    controller and this user may make them. Otherwise it makes none, and runs are limited only by the agent's
    own samples of their memory."""

    def __init__(self, filesystem: Path = CGROUP_FILESYSTEM, own: Path = OWN_CGROUP) -> None:
        self._parent: Path | None = None
        with contextlib.suppress(OSError):
            [path] = [line[3:] for line in own.read_text().splitlines() if line.startswith("0::")] or ["/"]
            parent = filesystem / path.lstrip("/")
            parent = parent if parent == filesystem else parent.parent
            if "memory" in (parent / "cgroup.subtree_control").read_text().split():
                self._parent = parent

    def hold(self, order: RunOrder, pid: int) -> None:
        """Move a process, with the children that it starts from now on, into a cgroup of the run. The kernel
        ends all of them when they take more memory than the run asked for. Memory that the process already
        had is not counted."""
        if self._parent is None or order.memory_mb == 0:
            return
        with contextlib.suppress(OSError):  # the agent enforces the limit too
            group = self._of(order.key)
            group.mkdir(exist_ok=True)
            (group / "memory.max").write_text(str(order.memory_mb * 2**20))
            (group / "memory.oom.group").write_text("1")
            (group / "cgroup.procs").write_text(str(pid))

    def breach_of(self, order: RunOrder) -> str:
        """Return the reason if the kernel has ended the run because of its memory; otherwise an empty
        string."""
        with contextlib.suppress(OSError):
            events = (self._of(order.key) / "memory.events").read_text().split()
            counts = dict(zip(events[::2], events[1::2], strict=False))
            if counts.get("oom_kill", "0") != "0":
                return f"it took more host memory than the {order.memory_mb} MiB that it asked for; {REMEDY}"
        return ""

    def release(self, key: RunKey) -> None:
        """Remove the cgroup of a run of which no process is left."""
        with contextlib.suppress(OSError):
            self._of(key).rmdir()

    def _of(self, key: RunKey) -> Path:
        return (self._parent or CGROUP_FILESYSTEM) / f"gpubroker-{key.task}-{key.fence}-{key.rank}"
