"""The rows of the logs of runs: the logs that gateways follow now, and the parts that are kept of each
log."""

from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json
from sqlalchemy import Column, Connection, FromClause, bindparam, delete, func, select

from gpubroker_server.adapters.sql.last_values import OF_GATEWAYS, write_last_values
from gpubroker_server.adapters.sql.session import Session, SqlPart, json_text, over
from gpubroker_server.adapters.sql.statements import OnConflict, begins_from, delete_rows, insert_into
from gpubroker_server.adapters.sql.system_tables import Count, last_value
from gpubroker_server.adapters.sql.tables import run_log
from gpubroker_server.core.domain.orders import LogName
from gpubroker_server.core.domain.units import Fence, Instant, TaskId, Term
from gpubroker_server.ports.run_logs import FollowedLogs, LogChanges, LogPart

_c = run_log.c
_LOG = (_c.task, _c.fence, _c.rank, _c.stream)
_OF_LOG = (
    _c.task == bindparam("task"),
    _c.fence == bindparam("fence"),
    _c.rank == bindparam("rank"),
    _c.stream == bindparam("stream"),
)
PARTS = (
    select(*run_log.c)
    .where(
        *_OF_LOG,
        begins_from(_c.first_byte, bindparam("after"), *_OF_LOG),
        _c.first_byte + _c.size_bytes > bindparam("after"),
    )
    .order_by(_c.first_byte)
    .limit(bindparam("most"))
)
END = select(func.max(_c.first_byte + _c.size_bytes), func.max(_c.at)).where(*_OF_LOG)
_FOLLOWED = select(last_value.c.key, last_value.c.value).where(last_value.c.kind == "logs")

drop_logs = delete_rows(run_log, ("task", "fence", "rank", "stream"))
put_parts = insert_into(run_log, known=OnConflict.REPLACE)


@over(*_LOG, Column("begin", Count), Column("end_at", Count))
def cut_logs(_insert: Any, r: FromClause) -> Any:
    """Remove the parts that lie completely between the bytes `begin` and `end_at`."""
    same = [column == r.c[column.name] for column in _LOG]
    inside = (_c.first_byte >= r.c.begin) & (_c.first_byte + _c.size_bytes <= r.c.end_at)
    return delete(run_log).where(select(r.c.task).where(*same, inside).exists())


class SqlRunLogs(SqlPart):
    """Implements the port `LogRows`."""

    async def follow_logs(self, followed: FollowedLogs) -> None:
        value = {"at": followed.at, "since": [[*log, since] for log, since in followed.since.items()]}
        row = ("logs", followed.gateway, OF_GATEWAYS + round(followed.at * 1e6), json_text(value))
        await self._write_alone(lambda session: session.write(write_last_values, [row]))

    async def followed_logs(self) -> Sequence[FollowedLogs]:
        return await self._readers.run(_followed)

    async def keep_logs(self, term: Term, changes: LogChanges) -> None:
        def act(session: Session) -> None:
            session.require_term(term)
            if changes.replaced:
                session.write(drop_logs, list(changes.replaced))
            if changes.parts:
                session.write(put_parts, [_row(part) for part in changes.parts])
            if changes.cut:
                session.write(cut_logs, [(*log, *between) for log, between in changes.cut.items()])

        await self._write_alone(act)

    async def log_parts(self, log: LogName, after_byte: int, limit: int) -> Sequence[LogPart]:
        return await self._readers.run(_parts, log, after_byte, limit)

    async def log_end(self, log: LogName) -> tuple[int, Instant | None]:
        return await self._readers.run(_end, log)


def _row(part: LogPart) -> tuple[Any, ...]:
    return (*part.log, part.first_byte, part.size_bytes, part.at, part.tenant, part.data, part.digest)


def _followed(connection: Connection) -> Sequence[FollowedLogs]:
    values = [(gateway, from_json(value)) for gateway, value in connection.execute(_FOLLOWED)]
    return [
        FollowedLogs(
            gateway,
            Instant(value["at"]),
            {
                LogName(TaskId(task), Fence(fence), rank, stream): Instant(since)
                for task, fence, rank, stream, since in value["since"]
            },
        )
        for gateway, value in values
    ]


def _parts(connection: Connection, log: LogName, after: int, most: int) -> Sequence[LogPart]:
    result = connection.execute(PARTS, {**log._asdict(), "after": after, "most": most})
    return [LogPart(log, *row[4:]) for row in result]


def _end(connection: Connection, log: LogName) -> tuple[int, Instant | None]:
    end, at = connection.execute(END, log._asdict()).one()
    return (0, None) if end is None else (int(end), Instant(at))
