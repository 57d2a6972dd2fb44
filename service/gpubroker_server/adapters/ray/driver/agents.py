"""The node agents that answer a service: of which release each is, and whether it may be replaced."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpubroker import __version__

from gpubroker_server.adapters.ray.wire import PROTOCOL, key_of
from gpubroker_server.core.domain.orders import (
    Ended,
    Ending,
    ForgetOrder,
    Gone,
    NodeSeen,
    Order,
    Report,
    RunId,
    StartOrder,
    WatchOrder,
)
from gpubroker_server.core.domain.units import NodeName
from gpubroker_server.ports.store import ReadTicks

IDLE_SECONDS = 1.0
"""So long nothing has to be on a node before its agent is replaced: one run's end often begins the next."""
AGAIN_SECONDS = 600.0
"""An agent as old as the one before it is replaced again no sooner: its machine has the old software."""

_GONE, _FORGOTTEN = "gone", "forgotten"


@dataclass(slots=True)
class Agent:
    incarnation: str
    protocol: int
    release: str
    """Empty if it does not say."""
    in_hand: dict[RunId, set[str]]
    """Each run that it has, or that was ordered, and what has come of it; until it is gone and forgotten."""
    idle_since: float | None

    @property
    def is_outdated(self) -> bool:
        return self.protocol < PROTOCOL or _number_of(self.release) < _number_of(__version__)


class Agents:
    """Those that have answered through the present driver. An agent may be of an earlier release: it outlives
    the service that made it. It is used as it is until nothing is left on its node, and then replaced."""

    def __init__(self, ticks: ReadTicks) -> None:
        self._ticks = ticks
        self._answering: dict[NodeName, Agent] = {}
        self._replaced_at: dict[NodeName, float] = {}
        """When an outdated one was last replaced."""

    def __contains__(self, node: NodeName) -> bool:
        return node in self._answering

    def __len__(self) -> int:
        return len(self._answering)

    def incarnations(self) -> Mapping[NodeName, str]:
        return {node: agent.incarnation for node, agent in self._answering.items()}

    def clear(self) -> None:
        self._answering.clear()

    def lose(self, node: NodeName) -> None:
        self._answering.pop(node, None)

    def see(self, seen: NodeSeen, protocol: int) -> None:
        in_hand: dict[RunId, set[str]] = {run: set() for run in seen.runs}
        agent = Agent(seen.node.incarnation, protocol, seen.release, in_hand, None)
        self._answering[seen.node.name] = agent
        if not agent.is_outdated:
            self._replaced_at.pop(seen.node.name, None)

    def order(self, order: Order) -> None:
        agent = self._answering.get(order.node)
        if agent is None:
            return
        run = order.task, order.fence, order.rank
        if isinstance(order, StartOrder | WatchOrder):
            agent.in_hand.setdefault(run, set())
            agent.idle_since = None
        elif isinstance(order, ForgetOrder):
            _note(agent, run, _FORGOTTEN)

    def hear(self, node: NodeName, report: Report) -> None:
        agent, run = self._answering.get(node), key_of(report)
        if agent is None or run is None:
            return
        if isinstance(report, Gone):
            _note(agent, run, _GONE)
        elif isinstance(report, Ended) and report.ending is Ending.NEVER_STARTED:
            agent.in_hand.pop(run, None)

    def to_replace(self) -> Iterator[NodeName]:
        """Outdated ones that have had nothing for a while; asked for again and again."""
        now = self._ticks()
        for node, agent in self._answering.items():
            if agent.in_hand or not agent.is_outdated or self._was_in_vain(node, now):
                agent.idle_since = None
            elif agent.idle_since is None:
                agent.idle_since = now
            elif now - agent.idle_since >= IDLE_SECONDS:
                self._replaced_at[node] = now
                yield node

    def views(self) -> dict[str, Mapping[str, Any]]:
        """For people, by node: release, protocol, outdated, and what comes of that."""
        now = self._ticks()
        return {str(node): self._view(node, agent, now) for node, agent in self._answering.items()}

    def _view(self, node: NodeName, agent: Agent, now: float) -> Mapping[str, Any]:
        message = None
        if agent.is_outdated and self._was_in_vain(node, now):
            message = (
                f"its machine has an earlier release of gpubroker than {__version__}; upgrade it there: the "
                "agent is then replaced when nothing is left on its node"
            )
        elif agent.is_outdated:
            message = (
                "it was started by an earlier release and goes on; it is replaced as soon as nothing is left "
                "on its node"
            )
        about = {"release": agent.release or None, "protocol": agent.protocol}
        return {**about, "outdated": agent.is_outdated, "message": message}

    def _was_in_vain(self, node: NodeName, now: float) -> bool:
        """To replace it: the one before was no older."""
        return now - self._replaced_at.get(node, -AGAIN_SECONDS) < AGAIN_SECONDS


def _note(agent: Agent, run: RunId, what: str) -> None:
    come = agent.in_hand.get(run)
    if come is not None:
        come.add(what)
        if come == {_GONE, _FORGOTTEN}:
            del agent.in_hand[run]


def _number_of(release: str) -> tuple[int, ...]:
    """To compare. One that does not say is taken for the oldest."""
    return tuple(map(int, re.findall(r"\d+", release)[:3]))
