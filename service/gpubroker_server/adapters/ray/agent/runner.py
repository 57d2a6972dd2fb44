"""The Ray actor around a process that runs tasks. The runs themselves are carried out by `gpubroker.runtime`.

Every answer is bytes of msgpack: the agent would unpickle any other object.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgpack
import ray
from gpubroker.runtime.calls import REFUSED
from gpubroker.runtime.host import RunHost
from gpubroker.runtime.mailbox import Mailbox
from gpubroker.runtime.messages import SPOKEN, TELLS_OUTPUT, RunKey, carriable
from gpubroker.runtime.output import sort_output_by_run
from gpubroker.runtime.process import (
    become,
    hide_devices,
    look_for_modules_in,
    settle_environment,
)

from gpubroker_server.adapters.ray.agent.run_guard import (
    keep_runs_out,
    ray_of_the_service,
    without_own_address,
)

MOST_CALLS = 9_000
"""The most calls to workers of sets in one process at once. More would make the agent's orders wait."""
_PACKED_BYTES = 4096
"""The first size of an answer's buffer, which grows as needed. The default would be 256 KiB."""
NO_ENV: Mapping[str, str] = MappingProxyType({})


class WrongProtocol(Exception):
    """The agent and this process share no protocol."""


class Runner:
    """A process for runs, blank until its first run. A spare takes one run and is killed after it; a shared
    process takes many.

    All methods run on the actor's event loop; user code runs in threads.
    """

    def __init__(
        self,
        task_path: Sequence[str],
        *,
        shared: bool,
        user: str = "",
        inherit_env: Sequence[str] = (),
        env: Mapping[str, str] = NO_ENV,
    ) -> None:
        """Prepare this process. A shared process changes to `user` at once; a spare changes its user when
        its run starts, after it has opened the log.

        Parameters that were added later have defaults, because an agent of an earlier release leaves them
        out.
        """
        settle_environment(inherit_env, without_own_address(env))
        keep_runs_out()
        hide_devices()
        look_for_modules_in(task_path)
        with contextlib.suppress(OSError):
            os.chdir(task_path[0])  # the directory need not exist on every node
        if shared:
            sort_output_by_run()
            if user:
                become(user)
        self._shared = shared
        self._task_path = task_path
        self._mailbox: Mailbox | None = None
        self._host: RunHost | None = None
        self._calls = 0
        """The number of calls to workers of sets that are under way."""

    async def describe(self) -> bytes:
        """Return a packed dict: the protocols that this process speaks, its pid, `shared`, and the runs that
        have not ended."""
        host, _ = self._parts()
        # The runs are copied first, because their threads remove those that have ended.
        runs = [order.to_wire() for order in list(host.orders.values())]
        return _packed({"speaks": SPOKEN, "pid": os.getpid(), "shared": self._shared, "runs": runs})

    async def exchange(self, protocol: int, acknowledged: int, items: Sequence[tuple[Any, ...]]) -> bytes:
        """Take orders, then wait for reports as `Mailbox.read` does. Returns the packed pairs of number and
        report, at once if no run is left.
        """
        if protocol not in SPOKEN:
            raise WrongProtocol(f"this process speaks protocols {SPOKEN}, the agent {protocol}")
        host, mailbox = self._parts()
        for item in items:
            host.take(item, tell_output=protocol >= TELLS_OUTPUT)
        reports = await mailbox.read(acknowledged, may_come=lambda: host.busy)
        return _packed([(number, carriable(report)) for number, report in reports])

    async def call(self, key: tuple[str, int, int], seconds: float, packed: bytes) -> bytes:
        """Call a method of the run's object, and return the packed answer of `SetWorker.call`. `packed`
        contains the role, the method, the form and the arguments."""
        host, _ = self._parts()
        if self._calls >= MOST_CALLS:
            return _packed((REFUSED, f"its process has {MOST_CALLS} calls, as many as may be"))
        self._calls += 1
        try:
            role, method, form, arguments = msgpack.unpackb(packed)
            return _packed(await host.call(RunKey(*key), role, method, form, arguments, seconds))
        finally:
            self._calls -= 1

    def _parts(self) -> tuple[RunHost, Mailbox]:
        """Return the host and the mailbox. The first call makes them, because there is no event loop
        before."""
        if self._host is None or self._mailbox is None:
            self._mailbox = Mailbox()
            self._host = RunHost(self._mailbox.journal, _shared_view, self._task_path)
        return self._host, self._mailbox


def _shared_view(shared: Any) -> memoryview:
    """Return a view of an object that the agent has put into Ray's object store."""
    with ray_of_the_service():
        view: memoryview = ray.get(shared).view
    return view


def _packed(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True, buf_size=_PACKED_BYTES)
    return packed
