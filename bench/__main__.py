"""Run one benchmark. Figures are JSON lines on stdout; progress and a summary go to stderr."""

import signal
import sys
from argparse import Action, ArgumentDefaultsHelpFormatter, ArgumentParser, RawDescriptionHelpFormatter
from importlib import import_module
from shutil import get_terminal_size
from textwrap import fill
from types import ModuleType

from bench.measuring import publish

BENCHMARKS: dict[str, ModuleType] = {
    name: import_module(f"bench.{name}")
    for name in (
        *(
            "accept",
            "against",
            "array",
            "batch",
            "cancel",
            "cli",
            "cost",
            "environments",
            "idle",
            "run",
            "nodes",
            "pickup",
            "preempt",
            "logs",
            "listeners",
            "objects",
            "queues",
            "restart",
            "soak",
            "worker_call",
        ),
        *(
            "openb",
            "plan",
            "evict",
            "turns",
            "churn",
            "simulate",
            "control",
            "samples",
            "proxy",
            "inferences",
        ),
    )
}


class _Help(RawDescriptionHelpFormatter, ArgumentDefaultsHelpFormatter):
    """Keeps the paragraphs of a description, and adds the default of an option to its help."""

    def _get_help_string(self, action: Action) -> str | None:
        has_default = action.default not in (None, False, "")
        return super()._get_help_string(action) if has_default else action.help


def parser() -> ArgumentParser:
    """Return the parser, with one subcommand for each benchmark; its help is the docstring of its module."""
    root = ArgumentParser(prog="python -m bench", description=__doc__)
    names = root.add_subparsers(dest="name", metavar="NAME", required=True)
    width = get_terminal_size().columns - 2
    for name, module in BENCHMARKS.items():
        paragraphs = (module.__doc__ or "").strip().split("\n\n")
        described = names.add_parser(
            name,
            help=paragraphs[0],
            description="\n\n".join(
                fill(paragraph, width, break_on_hyphens=False) for paragraph in paragraphs
            ),
            formatter_class=_Help,
        )
        module.add_options(described)
    return root


def main() -> int:
    """Run the benchmark of the command line. On SIGTERM a benchmark stops everything that it has started."""
    options = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    for figure in BENCHMARKS[options.name].measure(options):
        publish(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
