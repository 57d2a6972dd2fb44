"""The commands, and those that other packages add through the entry-point group `gpubroker.commands`."""

from importlib.metadata import entry_points
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_group

from gpubroker.cli import EXIT_USAGE
from gpubroker.cli.admin import tokens as administer
from gpubroker.cli.cluster import commands as cluster
from gpubroker.cli.cluster import detection, estimates, plan, quarantine
from gpubroker.cli.leases import commands as lease
from gpubroker.cli.models import commands as served
from gpubroker.cli.models import objects
from gpubroker.cli.session import Format, Output, say
from gpubroker.cli.tasks import change as control
from gpubroker.cli.tasks import show as tasks
from gpubroker.cli.tasks import submit

_SERVER_COMMANDS = frozenset({"serve", "down", "migrate", "migrate-data", "openapi"})

_WORDS_OF_OTHERS: Final = {
    "list": "ps", "ls": "ps", "status": "ps", "queue": "ps", "squeue": "ps", "jobs": "ps",
    "get": "show", "describe": "show", "info": "show", "why": "explain",
    "run": "submit", "sbatch": "submit", "start": "serve", "tokens": "token list",
    "kill": "cancel", "stop": "cancel", "rm": "cancel", "scancel": "cancel",
    "leases": "lease list", "top": "gpus", "devices": "gpus", "log": "logs", "output": "logs",
}  # fmt: skip
"""What other systems call our commands."""


class Commands(TyperGroup):
    """Our commands at once; those of other packages only when one of them, or the help, is asked for."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if own := super().get_command(ctx, cmd_name):
            return own
        if added := self._added().get(cmd_name):
            return added
        if cmd_name in _SERVER_COMMANDS:
            say(f"gpubroker: `gpubroker {cmd_name}` belongs to the service: pip install gpubroker-server")
            raise typer.Exit(EXIT_USAGE)
        if meant := _WORDS_OF_OTHERS.get(cmd_name):
            say(f"gpubroker: there is no command {cmd_name!r}; did you mean: gpubroker {meant}")
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
                say(f"the commands of {point.value} cannot be loaded: {error}")
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


def _say_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def options(
    url: Annotated[str | None, typer.Option(help="Address of the service. [GPUBROKER_URL]")] = None,
    token: Annotated[str | None, typer.Option(help="Token to show to it. [GPUBROKER_TOKEN]")] = None,
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Print it and leave.")
    ] = False,
) -> None:
    """Queue work for shared GPUs, see who holds what, and why a task waits.

    \b
    gpubroker submit team.training:fit -i epochs=3 --gpu-memory 18GiB --wait
    gpubroker ps
    gpubroker explain last
    """


def version(output: Output = Format.TABLE) -> None:
    """The version of this command line."""
    from gpubroker import __version__

    typer.echo(f"gpubroker {__version__}" if output is Format.TABLE else f'{{"version": "{__version__}"}}')


for part in (
    submit,
    tasks,
    control,
    lease,
    estimates,
    cluster,
    served,
    objects,
    quarantine,
    detection,
    plan,
    administer,
):
    part.add_to(app)
app.command(rich_help_panel="Administration")(version)
