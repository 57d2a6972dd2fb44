"""The commands, and those that other packages add through the entry-point group `gpubroker.commands`."""

from importlib.metadata import entry_points
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_group

from gpubroker import __version__
from gpubroker.cli import (
    EXIT_USAGE,
    cluster_commands,
    gpu_commands,
    lease_commands,
    model_commands,
    object_commands,
    plan_command,
    quarantine_commands,
    token_commands,
)
from gpubroker.cli.printing import Format, Output, eprint
from gpubroker.cli.tasks import change, events, explain, results, submit, view

_SERVER_COMMANDS = frozenset(
    {
        "serve",
        "gateway",
        "broker",
        "down",
        "migrate",
        "migrate-data",
        "backup",
        "restore",
        "new-lineage",
        "openapi",
    }
)

_OTHER_NAMES: Final = {
    "list": "ps", "ls": "ps", "status": "ps", "queue": "ps", "squeue": "ps", "jobs": "ps",
    "get": "show", "describe": "show", "info": "show", "why": "explain",
    "run": "submit", "sbatch": "submit", "start": "serve", "tokens": "token list",
    "kill": "cancel", "stop": "cancel", "rm": "cancel", "scancel": "cancel",
    "leases": "lease list", "top": "gpus", "devices": "gpus", "log": "logs", "output": "logs",
}  # fmt: skip
"""Names of these commands in other systems."""


class Commands(TyperGroup):
    """Loads the commands of other packages only if one of them, or the help, is asked for."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if own := super().get_command(ctx, cmd_name):
            return own
        if added := self._added().get(cmd_name):
            return added
        if cmd_name in _SERVER_COMMANDS:
            eprint(
                f"gpubroker: `gpubroker {cmd_name}` needs the service: pip install 'gpubroker-server[ray]'"
            )
            raise typer.Exit(EXIT_USAGE)
        if meant := _OTHER_NAMES.get(cmd_name):
            eprint(f"gpubroker: no command {cmd_name!r}; did you mean: gpubroker {meant}")
            raise typer.Exit(EXIT_USAGE)
        return None

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *self._added()]

    def _added(self) -> dict[str, Any]:
        app = typer.Typer(add_completion=False)
        app.callback()(lambda: None)
        for point in entry_points(group="gpubroker.commands"):
            try:
                point.load()(app)
            except ImportError as error:
                eprint(f"gpubroker: cannot load the commands of {point.value}: {error}")
        for command in app.registered_commands:
            command.rich_help_panel = "Service"
        return dict(get_group(app).commands)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 2 usage, 3 task failed, 4 cancelled, 5 wait timeout, 6 refused, 7 unreachable, "
    "8 would wait or does not fit.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def options(
    url: Annotated[str | None, typer.Option(help="Address of the service. [GPUBROKER_URL]")] = None,
    token: Annotated[str | None, typer.Option(help="Token to authenticate with. [GPUBROKER_TOKEN]")] = None,
    _version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit."),
    ] = False,
) -> None:
    """Queue work for shared GPUs, see what uses them, and find out why a task waits.

    \b
    gpubroker submit team.training:fit -i epochs=3 --gpu-memory 18GiB --wait
    gpubroker ps
    gpubroker explain last
    """


def version(output: Output = Format.TABLE) -> None:
    """Print the version of this command line."""
    typer.echo(f"gpubroker {__version__}" if output is Format.TABLE else f'{{"version": "{__version__}"}}')


for part in (
    submit,
    view,
    explain,
    results,
    events,
    change,
    lease_commands,
    gpu_commands,
    cluster_commands,
    model_commands,
    object_commands,
    quarantine_commands,
    plan_command,
    token_commands,
):
    part.add_to(app)
app.command(rich_help_panel="Administration")(version)
