"""`python -m bench NAME [options]`: figures as JSON lines on stdout, sentences on stderr."""

import argparse
import sys
from types import ModuleType

from bench import accept, preempt, run
from bench.measuring import publish

BENCHMARKS: dict[str, ModuleType] = {"accept": accept, "run": run, "preempt": preempt}


def parser() -> argparse.ArgumentParser:
    """One subcommand per benchmark; its help is the first line of its module."""
    root = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = root.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, module in BENCHMARKS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        module.add_options(names.add_parser(name, help=summary, description=module.__doc__))
    return root


def main() -> int:
    options = parser().parse_args()
    for figure in BENCHMARKS[options.name].measure(options):
        publish(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
