"""The node agents that answer a service, their releases, and when each may be replaced."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpubroker import __version__

from gpubroker_server.adapters.ray.wire import PROTOCOL, run_of
from gpubroker_server.core.domain.orders import (
    Ended,
    Ending,
    ForgetOrder,
    Gone,
    NodeReport,
    Order,
    Report,
    RunId,
    StartOrder,
    WatchOrder,
)
from gpubroker_server.core.domain.units import NodeName, release_numbers
from gpubroker_server.ports.store import ReadTicks
from gpubroker_server.ports.task_objects import ObjectQuestion

IDLE_SECONDS = 1.0
"""The time for which a node must be idle before its agent is replaced. The end of one run often begins the
next."""
AGAIN_SECONDS = 600.0
"""The shortest time between two replacements of an agent. If the successor is outdated too, its machine has
the earlier software."""

MESSAGES = 8
"""The number of an agent's last messages from which the offset of its clock is estimated."""

_GONE, _FORGOTTEN = "gone", "forgotten"


@dataclass(slots=True)
class AnsweringAgent:
    incarnation: str
    protocol: int
    release: str
    """The release of the agent; empty if unknown."""
    runs: dict[RunId, set[str]]
    """The events of each run that the agent has or was ordered to start, until the run is gone and
    forgotten."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """The GPUs that the agent cannot use, each with the reason."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """The versions of `python` and `ray`."""
    gpu_absence: str = ""
    """The reason why its machine shows no GPU; empty if it shows one."""
    is_outdated: bool = False
    """True if the agent is of an earlier release than this software."""
    idle_since: float | None = None
    ahead_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MESSAGES))
    """The seconds by which its clock seemed to be ahead in its last messages."""

    def note(self, run: RunId, occurrence: str) -> None:
        occurrences = self.runs.get(run)
        if occurrences is not None:
            occurrences.add(occurrence)
            if occurrences == {_GONE, _FORGOTTEN}:
                del self.runs[run]


class NodeAgents:
    """The agents that have answered through the present driver. An agent outlives the service that started
    it, so it may be of an earlier release. Such an agent stays in use until its node is idle, and is then
    replaced."""

    def __init__(self, ticks: ReadTicks) -> None:
        self._ticks = ticks
        self._answering: dict[NodeName, AnsweringAgent] = {}
        self._replaced_at: dict[NodeName, float] = {}
        """The time when an outdated agent was last replaced."""

    def __contains__(self, node: NodeName) -> bool:
        return node in self._answering

    def __len__(self) -> int:
        return len(self._answering)

    def protocol(self, node: NodeName) -> int:
        """Return the protocol that the agent of a node speaks; 0 if it has not answered."""
        agent = self._answering.get(node)
        return 0 if agent is None else agent.protocol

    def incarnations(self) -> Mapping[NodeName, str]:
        return {node: agent.incarnation for node, agent in self._answering.items()}

    def clear(self) -> None:
        self._answering.clear()

    def lose(self, node: NodeName) -> None:
        self._answering.pop(node, None)

    def see(self, seen: NodeReport, protocol: int) -> None:
        runs: dict[RunId, set[str]] = {run: set() for run in seen.runs}
        is_outdated = protocol < PROTOCOL or release_numbers(seen.release) < release_numbers(__version__)
        agent = AnsweringAgent(
            seen.node.incarnation, protocol, seen.release, runs, dict(seen.faults), dict(seen.versions),
            seen.gpu_absence, is_outdated,
        )  # fmt: skip
        self._answering[seen.node.name] = agent
        if not agent.is_outdated:
            self._replaced_at.pop(seen.node.name, None)

    def note_clock(self, node: NodeName, ahead_seconds: float) -> None:
        if (agent := self._answering.get(node)) is not None:
            agent.ahead_seconds.append(ahead_seconds)

    def on_order(self, order: Order) -> None:
        agent = self._answering.get(order.node)
        if agent is None:
            return
        run = order.task, order.fence, order.rank
        if isinstance(order, StartOrder | WatchOrder):
            agent.runs.setdefault(run, set())
            agent.idle_since = None
        elif isinstance(order, ForgetOrder):
            agent.note(run, _FORGOTTEN)

    def on_report(self, node: NodeName, report: Report | ObjectQuestion) -> None:
        agent, run = self._answering.get(node), run_of(report)
        if agent is None or run is None:
            return
        if isinstance(report, Gone):
            agent.note(run, _GONE)
        elif isinstance(report, Ended) and report.ending is Ending.NEVER_STARTED:
            agent.runs.pop(run, None)

    def to_replace(self, node: NodeName) -> bool:
        """Return True if the agent is outdated and its node has been idle for IDLE_SECONDS; it then counts
        as replaced. Call this with each message of the node."""
        agent, now = self._answering.get(node), self._ticks()
        if agent is None:
            return False
        if agent.runs or not agent.is_outdated or self._was_replaced_in_vain(node, now):
            agent.idle_since = None
            return False
        if agent.idle_since is None:
            agent.idle_since = now
        if now - agent.idle_since < IDLE_SECONDS:
            return False
        self._replaced_at[node] = now
        return True

    def views(self) -> dict[str, Mapping[str, Any]]:
        """Return the fields that clients see of each node's agent."""
        now = self._ticks()
        return {str(node): self._view(node, agent, now) for node, agent in self._answering.items()}

    def _view(self, node: NodeName, agent: AnsweringAgent, now: float) -> Mapping[str, Any]:
        message = None
        if agent.is_outdated and self._was_replaced_in_vain(node, now):
            message = (
                f"its machine has an earlier release of gpubroker than {__version__}; upgrade it there: the "
                "agent is then replaced when its node is idle"
            )
        elif agent.is_outdated:
            message = "an earlier release started it; it stays in use and is replaced when its node is idle"
        about = {"release": agent.release or None, "protocol": agent.protocol}
        return {
            **about,
            "outdated": agent.is_outdated,
            "message": message,
            "gpu_faults": dict(agent.faults),
            "gpu_absence": agent.gpu_absence or None,
            # A slow message makes the clock seem further ahead, so the least value is the best.
            "clock_ahead_seconds": round(min(agent.ahead_seconds, default=0.0)),
            **agent.versions,
        }

    def _was_replaced_in_vain(self, node: NodeName, now: float) -> bool:
        """Return True if the node's agent was replaced within AGAIN_SECONDS, so that an outdated agent there
        must be the successor."""
        return now - self._replaced_at.get(node, -AGAIN_SECONDS) < AGAIN_SECONDS
