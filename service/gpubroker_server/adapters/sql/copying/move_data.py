"""`gpubroker migrate-data` moves all data of a stopped SQLite service into an empty PostgreSQL database.

1. The file is locked, and both schemas are brought to the newest.
2. In one transaction of the server, every table is locked and found empty, filled with COPY, counted and
   compared by its digest. Then the mark `coming` is set, and everything is committed together.
3. The file gets the mark `gone`. From here on it is never served again.
4. The server's database gets the mark `here`, and may be served.

If the command is killed before step 3, the file is served as before, and the next move starts from the
beginning. If it is killed after step 3, the next move does step 4. So at most one of the two databases may be
served at any time. Objects are files of the data directory and stay there.
"""

from uuid import uuid4

from sqlalchemy import Engine

from gpubroker_server.adapters.sql import connections
from gpubroker_server.adapters.sql.copying.copied_tables import (
    Report,
    copy_all,
    copying_engine,
    plain_errors,
    take_empty_server,
)
from gpubroker_server.adapters.sql.database import (
    MoveMark,
    bring_to,
    file_engine,
    is_file,
    path_of,
    read_mark,
    server_engine,
    set_mark,
)
from gpubroker_server.adapters.sql.session import DatabaseRefused
from gpubroker_server.adapters.sql.sqlite import SqliteFile
from gpubroker_server.adapters.sql.system_tables import MoveStage, leadership


def move_data(source: str, target: str, report: Report) -> None:
    """Move the data of a file to a server. Raises DatabaseRefused. After that the file may be served as
    before, unless the message says that it has been moved."""
    if is_file(target, "--to") or not is_file(source, "--from, or database_url,"):
        raise DatabaseRefused(
            "data moves from a file to a server: --from sqlite:///path --to postgresql://user@host/name"
        )
    path = path_of(source)
    if not path.exists():
        raise DatabaseRefused(f"there is no {path}; name the file of the service with --from")
    file = SqliteFile(path)
    try:
        source_engine, target_engine = file_engine(file), copying_engine(target)
        bring_to(source_engine, "head", str(path))
        connections.check_server(target, "--to")
        bring_to(server_engine(target), "head", "the database")
        with plain_errors("the move, of which nothing is lost,", "--to"):
            _move(source_engine, target_engine, str(path.resolve()), connections.display_name(target), report)
    finally:
        file.close()


def _move(source_engine: Engine, target_engine: Engine, source: str, target: str, report: Report) -> None:
    with source_engine.begin() as reading:
        # This process has the lock on the file, so the last leader has ended: nobody waits for its lease.
        reading.execute(leadership.update().values(lease_until=0.0))
        mark = read_mark(reading)
        if mark is None or mark.stage is not MoveStage.GONE:
            mark = MoveMark(mark.move if mark else uuid4().hex, MoveStage.LEAVING, target)
            set_mark(reading, mark)
    if mark.stage is not MoveStage.GONE:
        with source_engine.connect() as reading, target_engine.begin() as writing:
            take_empty_server(writing, target, "--to", mark.move)
            copy_all(reading, writing, report)
            set_mark(writing, MoveMark(mark.move, MoveStage.COMING, source))
        report(f"everything is in {target}")
        with source_engine.begin() as reading:
            set_mark(reading, MoveMark(mark.move, MoveStage.GONE, target))
    report(f"{source} will not be served any more")
    with target_engine.begin() as writing:
        arrived = read_mark(writing)
        if arrived is None or arrived.move != mark.move:
            raise DatabaseRefused(f"{source} has been moved to {mark.other}, which is not {target}")
        set_mark(writing, MoveMark(mark.move, MoveStage.HERE, source))
