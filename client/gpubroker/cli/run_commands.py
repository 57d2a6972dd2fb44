"""Commands that a program calls inside its run: `progress`, `checkpoint` and `complete`.

`gpubroker.cli.main` carries them out itself if they have no options, without loading the command line.
"""

from typing import Annotated

import typer

from gpubroker.run_reports import report

Words = Annotated[list[str] | None, typer.Argument(metavar="[MESSAGE]...", help="Any text.")]
Fraction = Annotated[
    str, typer.Argument(metavar="FRACTION", help="Progress from 0 to 1, or the message alone.")
]
Uri = Annotated[
    str | None,
    typer.Argument(metavar="URI", help="Place where the state is saved: a file here, or any address."),
]


def progress(fraction: Fraction, message: Words = None) -> None:
    """Report progress of this run: a fraction from 0 to 1, a message, or both."""
    report("progress", fraction, *(message or ()))


def checkpoint(uri: Uri = None) -> None:
    """Report that this run has saved its state. The next attempt finds the URI in GPUBROKER_RESUME_URI."""
    report("checkpoint", *(() if uri is None else (uri,)))


def complete() -> None:
    """Report that the work of this run is done: then a stop notice that comes now does not repeat it."""
    report("complete")
