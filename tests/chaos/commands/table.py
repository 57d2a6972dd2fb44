"""Make the table of docs/explanation/reliability.md anew."""

import argparse

from tests.chaos import tables


def add_options(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(chosen: argparse.Namespace) -> None:
    tables.PAGE.write_text(tables.page(), encoding="utf-8")
