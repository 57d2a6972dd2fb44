"""The commands, and those that other packages add through the entry-point group `gpubroker.commands`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_group

from gpubroker import __version__
from gpubroker.cli import EXIT_USAGE
from gpubroker.cli.mistakes import explain, near_commands
from gpubroker.cli.printing import Format, Output, eprint

_PANELS: Final[Mapping[str, Mapping[str, str]]] = {
    "Tasks": {
        "tasks.submit": "submit",
        "tasks.view": "ps show",
        "tasks.explain": "explain",
        "tasks.results": "wait result logs",
        "tasks.outputs": "outputs",
        "tasks.arrays": "map array",
        "tasks.workers": "workers",
        "tasks.events": "events",
        "tasks.change": "cancel retry stack hold release priority change",
        "lease_commands": "lease",
        "cluster_commands": "estimates",
    },
    "Inside a command that gpubroker runs": {"run_commands": "progress checkpoint complete"},
    "Cluster": {
        "gpu_commands": "gpus close-gpu reopen-gpu",
        "cluster_commands": "tenants stats policy profiles demand",
        "fleet_commands": "targets doctor",
        "node_commands": "nodes cordon drain uncordon disk clean",
        "tasks.streams": "streams",
        "quarantine_commands": "pause resume quarantine",
        "plan_command": "plan",
    },
    "Models": {"infer_command": "infer", "model_commands": "load unload pin models"},
    "Objects": {"object_commands": "upload objects"},
    "Administration": {
        "token_commands": "token",
        "secret_commands": "secrets",
        "idle_template_commands": "idle-template",
    },
}
"""The panels of the help, and the commands of each module. A command loads its module alone (`bench cli`)."""
_PLACES = {
    command: (panel, module)
    for panel, modules in _PANELS.items()
    for module, commands in modules.items()
    for command in commands.split()
}

_AFTER_DASHES = frozenset({"submit", "map"})
"""The commands that run the words after `--`, and report themselves what is wrong with other words."""

_EXTENDED = frozenset({"doctor"})
"""The commands of which the server package, where it is installed, has a version that does more."""

_SERVER_COMMANDS = frozenset(
    {
        "serve",
        "gateway",
        "broker",
        "cluster",
        "config",
        "health",
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
    "secret": "secrets list",
    "kill": "cancel", "stop": "cancel", "rm": "cancel", "scancel": "cancel",
    "leases": "lease list", "top": "gpus", "devices": "gpus", "log": "logs", "output": "logs",
}  # fmt: skip
"""The names of these commands in other systems."""


_WORDS = "gpubroker.words"
_UsageError: Any = typer.BadParameter.__base__


@contextmanager
def _explained(words: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        explain(error, words)
        raise


def _did_you_mean(word: str, *meant: str) -> NoReturn:
    commands = ", or: ".join(f"gpubroker {name}" for name in meant)
    eprint(f"gpubroker: no command {word!r}; did you mean: {commands}")
    raise typer.Exit(EXIT_USAGE)


class Commands(TyperGroup):
    """Loads a command when it, or the help, is requested; the commands of other packages come last."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _EXTENDED and (added := self._added().get(cmd_name)):
            return added
        if cmd_name in _PLACES:
            return command_of(cmd_name)
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
            _did_you_mean(cmd_name, meant)
        return None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            names = {*self.list_commands(ctx), *_SERVER_COMMANDS}
            if meant := near_commands(args[0], names, _OTHER_NAMES):
                _did_you_mean(args[0], *meant)
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = tuple(args)
        with _explained(args):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _explained(ctx.meta[_WORDS]):
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        own = [*_PLACES, *super().list_commands(ctx)]
        return [*own, *(name for name in self._added() if name not in own)]

    def _added(self) -> dict[str, Any]:
        from importlib.metadata import entry_points

        app = typer.Typer(add_completion=False)
        app.callback()(lambda: None)
        for point in entry_points(group="gpubroker.commands"):
            try:
                point.load()(app)
            except ImportError as error:
                eprint(f"gpubroker: cannot load the commands of {point.value}: {error}")
        for command in app.registered_commands:
            command.rich_help_panel = "Service"
        for group in app.registered_groups:
            group.rich_help_panel = "Service"
        return dict(get_group(app).commands)


@cache
def command_of(name: str) -> Any:
    """Return the function or the group of this name in its module."""
    panel, module = _PLACES[name]
    members, word = vars(import_module(f"gpubroker.cli.{module}")), name.replace("-", "_")
    command = members.get(word) or members[f"{word}_"]
    part = typer.Typer(add_completion=False)
    part.callback()(lambda: None)
    settings: dict[str, Any] = {"name": name, "rich_help_panel": panel}
    if name in _AFTER_DASHES:
        from gpubroker.cli.tasks.submit import CommandAfterDashes

        settings |= {"cls": CommandAfterDashes, "context_settings": {"allow_extra_args": True}}
    if isinstance(command, typer.Typer):
        part.add_typer(command, **settings)
    else:
        part.command(**settings)(command)
    return get_group(part).commands[name]


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
    from gpubroker.cli.lookup import GLOBAL_OPTIONS

    GLOBAL_OPTIONS.update(url=url, token=token)


def version(output: Output = Format.TABLE) -> None:
    """Print the version of this command line."""
    typer.echo(f"gpubroker {__version__}" if output is Format.TABLE else f'{{"version": "{__version__}"}}')


app.command(rich_help_panel="Administration")(version)
