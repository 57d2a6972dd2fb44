"""The output of runs: which logs are asked for now, and what is done with what agents tell."""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from gpubroker_server.core.domain.orders import Logged, LogName
from gpubroker_server.core.domain.ranks import ranks_of
from gpubroker_server.core.domain.units import Instant, NodeName, Seconds
from gpubroker_server.core.world.world import World

FOLLOWED_SECONDS = Seconds(5.0)
"""The time after which the logs of a gateway that has not repeated them are not followed any more."""


class FollowedLogs(Struct, frozen=True):
    """The logs that the readers of a gateway read now."""

    gateway: str
    at: Instant
    since: Mapping[LogName, Instant]
    """Log -> the time at which its newest reader came."""


class WantedLog(Struct, frozen=True):
    node: NodeName
    since: Instant
    """The time at which the newest reader came. The reader waits for what the log has then, even if it is
    nothing."""


class KnownLog(Struct, frozen=True):
    """The part of a log that is kept."""

    end_byte: int = 0
    read_at: Instant | None = None
    """The time at which the newest part was read; None if there is none."""


def wanted_logs(world: World, followed: Iterable[FollowedLogs], now: Instant) -> dict[LogName, WantedLog]:
    """The logs that somebody reads, of runs that may go on printing."""
    wanted: dict[LogName, WantedLog] = {}
    for gateway in followed:
        if gateway.at <= now - FOLLOWED_SECONDS:
            continue
        for log, since in gateway.since.items():
            node = _node_of(world, log)
            if node is not None:
                known = wanted.get(log)
                wanted[log] = WantedLog(node, since if known is None else max(since, known.since))
    return wanted


def is_kept(logged: Logged, known: KnownLog, wanted: WantedLog | None) -> bool:
    """Return True if the part is to be kept. A part that was sent before is not, nor is an empty answer that
    no reader waits for, nor one that comes late: the whole log of a run that has ended may be kept by
    then."""
    if logged.is_final:
        return True
    if wanted is None or logged.first_byte < known.end_byte:
        return False
    return bool(logged.data) or known.read_at is None or known.read_at < wanted.since


def cut_between(logged: Logged, limit_bytes: int) -> tuple[int, int] | None:
    """The bytes of the log that are not kept any more: all but the first and the last half of the limit."""
    half = limit_bytes // 2
    return (half, logged.end_byte - half) if logged.end_byte > limit_bytes else None


def _node_of(world: World, log: LogName) -> NodeName | None:
    """Return the node of the run that writes the log; None if the run is over."""
    task = world.tasks.get(log.task)
    if task is None or task.fence != log.fence or not task.is_active:
        return None
    return dict(ranks_of(task)).get(log.rank)
