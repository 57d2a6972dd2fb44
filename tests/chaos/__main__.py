"""Inject faults and check what is left: `python -m tests.chaos COMMAND`."""

import argparse
import sys
from importlib import import_module

COMMANDS = {
    "sweep": "break every operation at every boundary of its statements",
    "kill": "kill -9 processes under load",
    "pause": "pause leaders past their lease, in the middle of a write or before an order",
    "power-loss": "cut the power of a SQLite database and check what is on the disk",
    "postgres-restart": "restart PostgreSQL and kill its backends under load",
    "network": "disturb connections under load",
    "shutdown": "stop gateways and brokers with SIGTERM, under load on Ray",
    "simulation": "simulate several brokers with random faults, each run from a seed",
    "mutation": "plant known faults in the source, and check that a test finds each",
    "evidence-page": "write the results in evidence/ into docs/explanation/reliability.md",
}
"""Each is a module of this package. Only the chosen one is loaded: most load Ray, and a process that forks at
hundreds of points pays for every page that it has."""


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Adds its default to the help of an option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default not in (None, False)
        return super()._get_help_string(action) if has_default else action.help


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, formatter_class=_Help)
        if name in sys.argv[1:2]:
            module = import_module(f"tests.chaos.{name.replace('-', '_')}")
            module.add_options(command)
            command.set_defaults(command=module.command)
    options = parser.parse_args()
    options.command(options)


if __name__ == "__main__":
    main()
