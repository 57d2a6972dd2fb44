"""What would become of a task, and the exit code that says so."""

from typing import TYPE_CHECKING, NoReturn

import typer

from gpubroker.cli import EXIT_NOT_NOW, EXIT_OK, EXIT_REFUSED
from gpubroker.cli.session import Format, emit

if TYPE_CHECKING:
    from gpubroker.tasks.explanation import Simulation

_EXITS = {"starts": EXIT_OK, "preempts": EXIT_OK, "refused": EXIT_REFUSED}


def show_simulation(told: "Simulation", output: Format) -> NoReturn:
    from gpubroker.cli.tasks.draw_explanation import simulation

    emit(output, told, simulation)
    raise typer.Exit(_EXITS.get(told.verdict, EXIT_NOT_NOW))
