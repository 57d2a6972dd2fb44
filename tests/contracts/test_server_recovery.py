"""PostgreSQL's own ways back, as docs/how-to/back-up.md describes them.

To a point in time, and to a standby for which every commit has waited.
"""

import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from gpubroker_server.ports.store import TaskFilter, TaskStore

from tests.builders import a_task
from tests.contracts.scenes import a_submission, next_term, opened, with_gpu
from tests.contracts.test_lineage import a_standby_of, both
from tests.patience import PATIENCE_SECONDS
from tests.places import short_place
from tests.postgres import OwnServer, a_server_of_its_own

pytestmark = pytest.mark.evidence


@contextmanager
def a_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gpubroker-pg-", dir=short_place()) as folder:
        os.chmod(folder, stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO)  # the server runs as another user
        yield folder


def told(server: OwnServer, *statements: str) -> None:
    with psycopg.connect(server.url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


def archived(server: OwnServer) -> None:
    """Wait until everything written so far is in the archive."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        [(last,)] = connection.execute("SELECT pg_walfile_name(pg_switch_wal())").fetchall()
        deadline = time.monotonic() + PATIENCE_SECONDS
        done = "SELECT last_archived_wal >= %s FROM pg_stat_archiver"
        while connection.execute(done, [last]).fetchone() != (True,):
            assert time.monotonic() < deadline, f"{last} is not archived"


async def tasks_of(store: TaskStore) -> set[str]:
    return {record.task.id for record in await store.records(TaskFilter("default", limit=10_000))}


async def test_recovery_to_a_point_in_time_begins_a_new_lineage() -> None:
    with a_server_of_its_own() as server, a_folder() as archive, a_folder() as folder:
        told(
            server,
            "ALTER SYSTEM SET archive_mode = on",
            f"ALTER SYSTEM SET archive_command = 'cp %p {archive}/%f'",
        )
        server.stop()
        server.start()
        async with opened(server.url) as store:
            await with_gpu(store, a_task("before"))
            copy = OwnServer.copy_of(server, folder)
            await store.submit(a_submission("kept"))
            lineage = (await store.leader()).lineage
            told(server, "SELECT pg_create_restore_point('here')")
            await store.submit(a_submission("lost"))
            archived(server)
        copy.recover_to("here", archive)
        copy.start()
        try:
            with psycopg.connect(copy.url, autocommit=True) as connection:
                while connection.execute("SELECT pg_is_in_recovery()").fetchone() == (True,):
                    pass
            async with opened(copy.url) as store:
                assert await tasks_of(store) == {"before", "kept"}
                await next_term(store)
                assert (await store.leader()).lineage > lineage
        finally:
            copy.stop("immediate")


async def test_a_standby_for_which_commits_wait_has_every_task_that_was_accepted() -> None:
    with a_server_of_its_own() as primary, a_standby_of(primary) as standby:
        told(primary, "ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
        async with opened(both(primary, standby)) as store:
            accepted = {f"task-{number}" for number in range(200)}
            for task in sorted(accepted):
                await store.submit(a_submission(task))
            primary.stop("immediate")
            standby.promote()
        async with opened(standby.url) as store:
            assert await tasks_of(store) == accepted
