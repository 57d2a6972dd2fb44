"""The output of runs, in memory."""

from collections.abc import Callable, Sequence, Set

from gpubroker_server.adapters.memory.leadership import LeaderInMemory
from gpubroker_server.core.domain.orders import LogName
from gpubroker_server.core.domain.units import Instant, TaskId, Term
from gpubroker_server.ports.run_logs import FollowedLogs, LogChanges, LogPart


class RunLogsInMemory(LeaderInMemory):
    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(now)
        self._followed: dict[str, FollowedLogs] = {}
        self._logs: dict[LogName, dict[int, LogPart]] = {}
        """By first byte."""

    async def follow_logs(self, followed: FollowedLogs) -> None:
        self._followed[followed.gateway] = followed

    async def followed_logs(self) -> Sequence[FollowedLogs]:
        return list(self._followed.values())

    async def keep_logs(self, term: Term, changes: LogChanges) -> None:
        self._require(term)
        for log in changes.replaced:
            self._logs.pop(log, None)
        for part in changes.parts:
            self._logs.setdefault(part.log, {})[part.first_byte] = part
        for log, (begin, end) in (changes.cut or {}).items():
            parts = self._logs.get(log, {})
            for at in [at for at, part in parts.items() if at >= begin and part.end_byte <= end]:
                del parts[at]

    async def log_parts(self, log: LogName, after_byte: int, limit: int) -> Sequence[LogPart]:
        parts = [part for part in self._logs.get(log, {}).values() if part.end_byte > after_byte]
        return sorted(parts, key=lambda part: part.first_byte)[:limit]

    async def log_end(self, log: LogName) -> tuple[int, Instant | None]:
        parts = self._logs.get(log, {}).values()
        if not parts:
            return 0, None
        return max(part.end_byte for part in parts), max(part.at for part in parts)

    def drop_logs_of(self, task: TaskId) -> None:
        for log in [log for log in self._logs if log.task == task]:
            del self._logs[log]

    def logged(self) -> Set[str]:
        """Digests of all objects."""
        parts = (part for log in self._logs.values() for part in log.values())
        return {part.digest for part in parts if part.digest is not None}
