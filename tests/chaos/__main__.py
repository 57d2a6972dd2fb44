"""python -m tests.chaos ...: break things on purpose, and look at what is left."""

import argparse
import sys
from importlib import import_module

COMMANDS = {
    "sweep": "break every operation at every boundary of its statements",
    "kills": "kill -9 of processes under load, and count what is lost",
    "zombies": "leaders that sleep past their lease in the middle of a write, or before an order",
    "power-loss": "power cuts on SQLite: what is on the disk after them",
    "blows": "restarts of PostgreSQL and kills of its backends, under load",
    "network": "lines on which things go wrong, under load",
    "stops": "gateways and brokers asked to end, under load on Ray",
    "simulation": "storms of faults over several brokers, each made from its seed on a clock of its own",
    "mutants": "plant faults, and see which test finds each",
    "table": "make the table of docs/explanation/reliability.md anew",
}
"""Each is a module of `commands`, and only the one that is asked for is loaded: all of them load Ray, and who
forks at each of hundreds of points pays for every page that it has."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, what_it_does in COMMANDS.items():
        command = commands.add_parser(name, help=what_it_does)
        if name in sys.argv[1:2]:
            asked_for = import_module(f"tests.chaos.commands.{name.replace('-', '_')}")
            asked_for.add_options(command)
            command.set_defaults(run=asked_for.run)
    chosen = parser.parse_args()
    chosen.run(chosen)


if __name__ == "__main__":
    main()
