"""`python -m bench NAME [options]`: figures as JSON lines on stdout, sentences on stderr."""

import signal
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from types import ModuleType

from bench import (
    accept,
    batch,
    churn,
    evict,
    inferences,
    openb,
    pickup,
    plan,
    preempt,
    proxy,
    queues,
    restart,
    run,
    simulate,
    soak,
)
from bench.measuring import publish

BENCHMARKS: dict[str, ModuleType] = {
    "accept": accept,
    "batch": batch,
    "run": run,
    "pickup": pickup,
    "preempt": preempt,
    "queues": queues,
    "restart": restart,
    "soak": soak,
    "openb": openb,
    "plan": plan,
    "evict": evict,
    "churn": churn,
    "simulate": simulate,
    "proxy": proxy,
    "inferences": inferences,
}


def parser() -> ArgumentParser:
    """One subcommand per benchmark; its help is the first line of its module."""
    root = ArgumentParser(prog="python -m bench", description=__doc__)
    names = root.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, module in BENCHMARKS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        described = names.add_parser(
            name, help=summary, description=module.__doc__, formatter_class=RawDescriptionHelpFormatter
        )
        module.add_options(described)
    return root


def main() -> int:
    """Also when it is told to end before it is done, it stops what it has started."""
    options = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    for figure in BENCHMARKS[options.name].measure(options):
        publish(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
