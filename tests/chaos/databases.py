"""A database of one's own, as durable as one in service."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpubroker_server.adapters.sql.store import migrate

from tests.postgres import a_server_of_its_own

DURABILITY = {
    "sqlite": "journal_mode=WAL, synchronous=FULL",
    "postgres": "fsync=on, synchronous_commit=on",
}


@contextmanager
def a_database(name: str, folder: Path) -> Iterator[str]:
    """Migrated, and with nothing in it; its URL."""
    if name == "sqlite":
        url = f"sqlite:///{folder / 'gpubroker.db'}"
        migrate(url, "head")
        yield url
        return
    with a_server_of_its_own() as server:
        migrate(server.url, "head")
        yield server.url
