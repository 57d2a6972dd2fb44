"""The ways in which the service is run: by one process on either database, or by several on PostgreSQL."""

import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.postgres import postgres
from bench.processes import SQLITE_DURABILITY, Service, brokering, served, settle

VARIANTS = {"sqlite": 0, "postgres": 0, "gateways_1": 1, "gateways_2": 2}
"""Name -> how many gateways there are beside a broker; 0 is one process that is both."""


@dataclass(frozen=True)
class Site:
    doors: Sequence[Service]
    """Where requests are taken."""
    database: str
    """A SQLite file, or the address of a PostgreSQL."""
    durability: str
    broker: psutil.Popen | None = None
    """Apart from the doors, if there is one."""

    @property
    def processes(self) -> list[psutil.Popen]:
        doors = [door.process for door in self.doors]
        return doors if self.broker is None else [*doors, self.broker]

    def settle(self) -> None:
        for process in self.processes:
            settle(process)


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
    """How its figures begin: what names no variant is one process on SQLite."""
    return bench if variant == "sqlite" else f"{bench}.{variant}"


@dataclass(frozen=True)
class Home:
    """Where everything stays that outlasts a process."""

    variant: str
    folder: Path
    database: str
    """A SQLite file, or the address of a PostgreSQL."""
    durability: str

    @contextmanager
    def started(self, **settings: str) -> Iterator[Site]:
        """Ready to be asked, with these settings (names without GPUBROKER_). All of it is stopped again."""
        if self.variant != "sqlite":
            settings = {**settings, "DATABASE_URL": self.database}
        gateways = VARIANTS[self.variant]
        if gateways:
            with self._several(gateways, settings) as (doors, broker):
                yield Site(doors, self.database, self.durability, broker)
        else:
            with served(self.folder, **settings) as one:
                yield Site([one], self.database, self.durability)

    @contextmanager
    def _several(
        self, gateways: int, settings: Mapping[str, str]
    ) -> Iterator[tuple[Sequence[Service], psutil.Popen]]:
        """So many gateways, and a broker that leads."""
        shared = {**settings, "BLOB_DIR": str(self.folder / "objects")}
        with brokering(self.folder / "broker", **shared) as broker:
            try:
                with ExitStack() as open_doors:
                    doors = [
                        open_doors.enter_context(served(self.folder / f"gateway-{one}", "gateway", **shared))
                        for one in range(gateways)
                    ]
                    for door in doors:
                        door.wait_for_leader()
                    yield doors, broker
            finally:
                down = [
                    sys.executable,
                    "-m",
                    "gpubroker_server",
                    "down",
                    "--data-dir",
                    str(self.folder / "broker"),
                ]
                subprocess.run(down, check=True, capture_output=True)


@contextmanager
def home(variant: str) -> Iterator[Home]:
    """An empty one, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="gpb-bench-") as name:
        folder = Path(name)
        if variant == "sqlite":
            yield Home(variant, folder, str(folder / "gpubroker.db"), SQLITE_DURABILITY)
        else:
            with postgres() as (url, durability):
                yield Home(variant, folder, url, durability)


@contextmanager
def site(variant: str, **settings: str) -> Iterator[Site]:
    """One with an empty home."""
    with home(variant) as place, place.started(**settings) as running:
        yield running
