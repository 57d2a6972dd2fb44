"""The output of runs: which logs are wanted now, and which parts of logs from agents are kept."""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from gpubroker_server.core.domain.orders import Logged, LogName
from gpubroker_server.core.domain.ranks import ranks_of
from gpubroker_server.core.domain.units import Instant, NodeName, Seconds
from gpubroker_server.core.world.world import World

FOLLOWED_SECONDS = Seconds(5.0)
"""The time after which logs are no longer followed for a gateway that has not asked for them again."""


class FollowedLogs(Struct, frozen=True):
    """The logs that the readers of a gateway read now."""

    gateway: str
    at: Instant
    since: Mapping[LogName, Instant]
    """Maps a log to the time at which its newest reader came."""


class WantedLog(Struct, frozen=True):
    node: NodeName
    since: Instant
    """The time at which the newest reader came. The reader waits for the content of the log at that time,
    even if it is empty."""


class KnownLog(Struct, frozen=True):
    """The part of a log that is kept."""

    end_byte: int = 0
    read_at: Instant | None = None
    """The time at which the newest part was read; None if there is none."""


def wanted_logs(world: World, followed: Iterable[FollowedLogs], now: Instant) -> dict[LogName, WantedLog]:
    """Return the logs that somebody reads, of runs that may still print."""
    wanted: dict[LogName, WantedLog] = {}
    for gateway in followed:
        if gateway.at <= now - FOLLOWED_SECONDS:
            continue
        for log, since in gateway.since.items():
            node = _node_of(world, log)
            if node is not None:
                other = wanted.get(log)
                wanted[log] = WantedLog(node, since if other is None else max(since, other.since))
    return wanted


def is_kept(logged: Logged, known: KnownLog, wanted: WantedLog | None) -> bool:
    """Return True if the part is to be kept. A part that was sent before is not kept, nor an empty answer
    that no reader waits for, nor a late part: by then the whole log of the ended run may be kept."""
    if logged.is_final:
        return True
    if wanted is None or logged.first_byte < known.end_byte:
        return False
    return bool(logged.data) or known.read_at is None or known.read_at < wanted.since


def cut_between(logged: Logged, limit_bytes: int) -> tuple[int, int] | None:
    """Return the range of bytes of the log that is dropped, if the log exceeds the limit. The first and the
    last bytes stay, each up to half of the limit."""
    half = limit_bytes // 2
    return (half, logged.end_byte - half) if logged.end_byte > limit_bytes else None


def _node_of(world: World, log: LogName) -> NodeName | None:
    """Return the node of the run that writes the log; None if the run is over."""
    task = world.tasks.get(log.task)
    if task is None or task.fence != log.fence or not task.is_active:
        return None
    return dict(ranks_of(task)).get(log.rank)
