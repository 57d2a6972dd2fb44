"""Break every operation at every boundary of its statements."""

import argparse
import tempfile
from pathlib import Path

from tests.chaos.databases import DURABILITY, a_database
from tests.chaos.faults import Fault
from tests.chaos.operations import OPERATIONS
from tests.chaos.sweep import Sweep


def add_options(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--database-url", help="of a migrated database in which nothing is")
    where.add_argument("--database", choices=sorted(DURABILITY), help="one that is made for this")
    parser.add_argument("--operation", action="append", choices=sorted(OPERATIONS))
    parser.add_argument("--fault", action="append", choices=[Fault.CUT.value, Fault.KILL.value])


def run(chosen: argparse.Namespace) -> None:
    faults = [Fault(name) for name in chosen.fault or (Fault.CUT, Fault.KILL)]
    names = chosen.operation or OPERATIONS
    operations = {name: OPERATIONS[name] for name in names}
    if chosen.database_url is not None:
        print(Sweep(chosen.database_url).run(faults, operations))
        return
    with tempfile.TemporaryDirectory() as folder, a_database(chosen.database, Path(folder)) as url:
        print(Sweep(url).run(faults, operations))
