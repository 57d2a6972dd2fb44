"""`gpubroker config`: check and show the configuration, and print its schema."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from gpubroker.cli.printing import Format, Output, print_drawn
from gpubroker.cli.tables import Column, PlainTable
from msgspec import to_builtins

from gpubroker_server.settings.loading import (
    GivenSetting,
    SettingsRefused,
    given_settings,
    load_settings,
)

config_ = typer.Typer(no_args_is_help=True, help="Check and show the configuration of the service.")

Config = Annotated[Path | None, typer.Option("--config", help="Configuration file (YAML).")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting, as `serve` takes it.")
]
_HIDDEN = "***"
_SECRET_NAMES = re.compile(r"headers|passw|secret|token|credential|api_?key|_key$", re.IGNORECASE)
"""The names of settings, and of entries such as environment variables, whose values may be secrets."""
_PASSWORD = re.compile(r"(?<=://)([^/@:]*):[^/@]*@")
_TOKEN_IN_URL = re.compile(r"(?<=http://|ttps://)[^/@:]+@")
"""Package indexes take a token in place of a user."""


@config_.command()
def check(config: Config = None, sets: Sets = None) -> None:
    """Check the settings of all sources, and report all faults together. Exit code 0 or 2."""
    given = _given(config, sets or ())
    origins = sorted({setting.origin for setting in given})
    count = f"{len(given)} setting{'' if len(given) == 1 else 's'}"
    typer.echo(f"the configuration is right: {count} from {', '.join(origins)}" if given else _ALL_DEFAULTS)


@config_.command()
def show(
    config: Config = None,
    sets: Sets = None,
    defaults: Annotated[bool, typer.Option("--defaults", help="Also settings that no source has.")] = False,
    origin: Annotated[bool, typer.Option("--origin", help="Where each value comes from.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """Show the settings that hold. Passwords, tokens and headers are hidden."""
    settings = _given(config, sets or ())
    if defaults:
        settings = list(_with_defaults(settings))
    rows = [(".".join(setting.path), _shown(setting), setting.origin) for setting in settings]
    if output is Format.TABLE and rows:
        columns = (Column("SETTING"), Column("VALUE", wraps=True), Column("ORIGIN", wraps=True))
        texts = [(name, _text(value), place) for name, value, place in rows]
        width = 3 if origin else 2
        print_drawn(PlainTable(columns[:width], [row[:width] for row in texts]))
    elif output is Format.TABLE:
        typer.echo(_ALL_DEFAULTS)
    else:
        items = [{"setting": name, "value": value, "origin": place} for name, value, place in rows]
        for text in [json.dumps(items, indent=2)] if output is Format.JSON else map(json.dumps, items):
            typer.echo(text)


@config_.command()
def schema() -> None:
    """Print the JSON Schema of a configuration file, for editors."""
    from gpubroker_server.settings.reference import settings_schema

    typer.echo(json.dumps(settings_schema(), indent=2))


@config_.command()
def reference() -> None:
    """Print the page about all settings, as Markdown."""
    from gpubroker_server.settings.reference import settings_page

    typer.echo(settings_page(), nl=False)


_ALL_DEFAULTS = "all settings have their defaults: gpubroker config show --defaults"


def _given(config: Path | None, sets: Sequence[str]) -> list[GivenSetting]:
    try:
        load_settings(config, sets=sets)
        return list(given_settings(config, sets=sets))
    except SettingsRefused as refused:
        typer.echo(f"gpubroker: {refused}", err=True)
        raise typer.Exit(2) from None


def _with_defaults(given: Sequence[GivenSetting]) -> Iterator[GivenSetting]:
    """Yield all settings in the order of config.example.yaml."""
    from gpubroker_server.settings.reference import documented_settings

    known = {setting.path: setting for setting in given}
    for setting in documented_settings():
        if not setting.is_section:
            yield known.get(setting.path) or GivenSetting(setting.path, setting.default, "default")


def _shown(setting: GivenSetting) -> Any:
    value = to_builtins(setting.value, enc_hook=str)
    if setting.path[0] == "extensions":  # only the extension knows which of its options are secrets
        return _HIDDEN if len(setting.path) > 1 else dict.fromkeys(value, _HIDDEN)
    return _without_secrets(value, setting.path[-1])


def _without_secrets(value: Any, name: str) -> Any:
    if value and _SECRET_NAMES.search(name) and not name.endswith(("_file", "_from_tasks")):
        return _HIDDEN
    if isinstance(value, str):
        return _TOKEN_IN_URL.sub(f"{_HIDDEN}@", _PASSWORD.sub(rf"\1:{_HIDDEN}@", value))
    if isinstance(value, list):
        return [_without_secrets(item, name) for item in value]
    if isinstance(value, dict):
        return {key: _without_secrets(item, str(key)) for key, item in value.items()}
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
