"""python -m tests.chaos sweep --database-url URL: break things on purpose, and look at what is left."""

import argparse

from tests.chaos.faults import Fault
from tests.chaos.sweep import Sweep


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    commands = parser.add_subparsers(required=True)
    sweep = commands.add_parser("sweep", help="break every operation at every boundary of its statements")
    sweep.add_argument("--database-url", required=True, help="of a migrated database in which nothing is")
    sweep.add_argument("--fault", action="append", choices=[fault.value for fault in Fault])
    sweep.set_defaults(run=_sweep)
    chosen = parser.parse_args()
    chosen.run(chosen)


def _sweep(chosen: argparse.Namespace) -> None:
    faults = [Fault(name) for name in chosen.fault or Fault]
    print(Sweep(chosen.database_url).run(faults))


if __name__ == "__main__":
    main()
