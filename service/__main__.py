"""`python -m service` and the server's commands of the `gpubroker` command line."""

from pathlib import Path
from typing import Annotated, Any

import typer

from service.settings import Settings, SettingsRefused, load_settings

Config = Annotated[Path | None, typer.Option("--config", help="Configuration file (YAML).")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Database, blobs, tokens and state files.")]
DatabaseUrl = Annotated[
    str | None, typer.Option("--database-url", help="sqlite:///path or postgresql://user@host/name.")
]


def serve(
    config: Config = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = None,
) -> None:
    """Start the service in the foreground: HTTP, leader and a local Ray."""
    from service.bootstrap import StartRefused, run_service

    settings = _settings(
        config, data_dir=data_dir, database_url=database_url, host=host, port=port, log_level=log_level
    )
    try:
        raise typer.Exit(run_service(settings))
    except StartRefused as refused:
        raise _refused(str(refused)) from None


def down(config: Config = None, data_dir: DataDir = None) -> None:
    """Stop the service of this data directory and the local Ray it left running."""
    from service.bootstrap import StillRunning, stop_everything

    try:
        for line in stop_everything(_settings(config, data_dir=data_dir)):
            typer.echo(line, err=True)
    except StillRunning as refused:
        typer.echo(f"gpubroker: {refused}", err=True)
        raise typer.Exit(1) from None


def migrate(
    config: Config = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    to: Annotated[str, typer.Option(help="Revision to go to, up or down.")] = "head",
) -> None:
    """Bring the database to a revision; the service must not be running on a SQLite file meanwhile."""
    from service.bootstrap import StartRefused, migrate_database

    settings = _settings(config, data_dir=data_dir, database_url=database_url)
    try:
        typer.echo(migrate_database(settings, to), err=True)
    except StartRefused as refused:
        raise _refused(str(refused)) from None


def migrate_data(
    target: Annotated[str, typer.Option("--to", help="An empty database: postgresql://user@host/name.")],
    source: Annotated[
        str | None, typer.Option("--from", help="sqlite:///path; otherwise the one of the configuration.")
    ] = None,
    config: Config = None,
    data_dir: DataDir = None,
) -> None:
    """Move a stopped service from its SQLite file to PostgreSQL: everything, or nothing.

    Every table is compared once it has arrived, and the file is then never served again. Broken off at any
    moment it is simply run again. Runs go on meanwhile.
    """
    from service.bootstrap import StartRefused, move_database

    settings = _settings(config, data_dir=data_dir, database_url=source)
    try:
        move_database(settings, target, lambda line: typer.echo(line, err=True))
    except StartRefused as refused:
        raise _refused(str(refused)) from None


def openapi() -> None:
    """Print the OpenAPI document as YAML."""
    from service.bootstrap import openapi_yaml

    typer.echo(openapi_yaml(), nl=False)


def commands(app: typer.Typer) -> None:
    """Add the server's commands to a command line. Entry point of group `gpubroker.commands`."""
    for command in (serve, down, migrate, migrate_data, openapi):
        app.command()(command)


def main() -> None:
    app = typer.Typer(no_args_is_help=True, add_completion=False)
    commands(app)
    app()


def _settings(config: Path | None, **flags: Any) -> Settings:
    try:
        return load_settings(config, **flags)
    except SettingsRefused as refused:
        raise _refused(str(refused)) from None


def _refused(message: str) -> typer.Exit:
    typer.echo(f"gpubroker: {message}", err=True)
    return typer.Exit(2)


if __name__ == "__main__":
    main()
