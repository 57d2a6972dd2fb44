"""`python -m gpubroker_server` and the server's commands of the `gpubroker` command line."""

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from gpubroker.cli.printing import Format, Output

from gpubroker_server.bootstrap.cluster_commands import cluster
from gpubroker_server.bootstrap.config_commands import config_
from gpubroker_server.settings.loading import Settings, SettingsRefused, load_settings

Config = Annotated[Path | None, typer.Option("--config", help="Configuration file (YAML).")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Any setting, such as limits.body_bytes=16MiB. Repeatable."
    ),
]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Database, blobs, tokens and state files.")]
DatabaseUrl = Annotated[
    str | None, typer.Option("--database-url", help="sqlite:///path or postgresql://user@host/name.")
]

Host = Annotated[str | None, typer.Option(help="Address to listen on.")]
Port = Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")]
Ray = Annotated[
    str | None,
    typer.Option("--ray", help="Head of a Ray cluster to join, as host:6379; default: a local Ray."),
]
Role = Literal["serve", "gateway", "broker", "node"]
LogLevel = Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")]


DEMO: Mapping[str, Any] = {
    "simulated_devices": [{"kind": "sim-24g", "memory_mb": 24576, "count": 2}],
    "entrypoints": ["gpubroker.example:*"],
}


def serve(
    config: Config = None,
    sets: Sets = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    host: Host = None,
    port: Port = None,
    ray: Ray = None,
    log_level: LogLevel = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Two simulated GPUs, and gpubroker.example:fit to run on them.")
    ] = False,
) -> None:
    """Start the service in the foreground: HTTP, leader, and a local Ray unless it joins one."""
    flags: dict[str, Any] = {"data_dir": data_dir, "database_url": database_url, "host": host, "port": port}
    flags["ray"] = None if ray is None else {"address": ray}
    flags |= DEMO if demo else {}
    _run(_settings(config, sets, **flags, log_level=log_level), speaks=True, leads=True)


def gateway(
    config: Config = None,
    sets: Sets = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    host: Host = None,
    port: Port = None,
    log_level: LogLevel = None,
) -> None:
    """Start a gateway, on PostgreSQL: it serves HTTP; a broker decides and runs tasks."""
    flags = {"data_dir": data_dir, "database_url": database_url, "host": host, "port": port}
    _run(_settings(config, sets, **flags, log_level=log_level), speaks=True, leads=False)


def broker(
    config: Config = None,
    sets: Sets = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    ray: Ray = None,
    log_level: LogLevel = None,
) -> None:
    """Start a broker, on PostgreSQL: it decides and runs tasks; one of all brokers leads."""
    flags: dict[str, Any] = {"data_dir": data_dir, "database_url": database_url}
    flags["ray"] = None if ray is None else {"address": ray}
    _run(_settings(config, sets, **flags, log_level=log_level), speaks=False, leads=True)


def down(config: Config = None, sets: Sets = None, data_dir: DataDir = None) -> None:
    """Stop the service of this data directory and its local Ray."""
    from gpubroker_server.bootstrap.down import StillRunning, stop_everything

    try:
        for line in stop_everything(_settings(config, sets, data_dir=data_dir)):
            typer.echo(line, err=True)
    except StillRunning as refused:
        typer.echo(f"gpubroker: {refused}", err=True)
        raise typer.Exit(1) from None


def health(
    role: Annotated[
        Role | None,
        typer.Argument(help="Default: what runs with the data directory. node: what `ray start` started."),
    ] = None,
    config: Config = None,
    sets: Sets = None,
    data_dir: DataDir = None,
    url: Annotated[str | None, typer.Option(help="Ask at this address, such as a proxy's with TLS.")] = None,
) -> None:
    """Say whether the process of this data directory lives, for health checks of containers. Exit code 0 or
    1."""
    from gpubroker_server.bootstrap.diagnosis.health import health_at, health_of

    try:
        settings = _settings(config, sets, data_dir=data_dir)
    except typer.Exit:
        raise typer.Exit(1) from None
    found = health_at(url) if url else health_of(settings.data_dir, role)
    typer.echo(f"gpubroker: {found.sentence}", err=not found.is_alive)
    if not found.is_alive:
        raise typer.Exit(1)


def doctor(
    config: Config = None, sets: Sets = None, data_dir: DataDir = None, output: Output = Format.TABLE
) -> None:
    """Say what is wrong with this machine and the fleet, and what to do; exit code 1 if it is critical.

    Works without a running service too: then it looks at this machine alone.
    """
    from gpubroker.cli.fleet_commands import report

    from gpubroker_server.bootstrap.diagnosis.doctor import findings_for

    report(findings_for(_settings(config, sets, data_dir=data_dir)), output)


def migrate(
    config: Config = None,
    sets: Sets = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    to: Annotated[str, typer.Option(help="Revision to go to, up or down, such as 0003.")] = "head",
    drop_everything: Annotated[
        bool, typer.Option("--drop-everything", help="Required for --to base, which drops every table.")
    ] = False,
) -> None:
    """Bring the database to a revision.

    Stop the service first if it uses a SQLite file, or to go back.
    """
    from gpubroker_server.bootstrap.commands import migrate_database, refusing

    settings = _settings(config, sets, data_dir=data_dir, database_url=database_url)
    with refusing():
        typer.echo(migrate_database(settings, to, drop_everything=drop_everything), err=True)


def new_lineage(
    config: Config = None, sets: Sets = None, data_dir: DataDir = None, database_url: DatabaseUrl = None
) -> None:
    """Go on with a database that was restored from a backup. Stop the service first.

    Needed only if nodes refuse it: they follow a later lineage of it, as the log says.

    Runs that started after the backup are killed.
    """
    from gpubroker_server.bootstrap.commands import refusing, start_new_lineage

    settings = _settings(config, sets, data_dir=data_dir, database_url=database_url)
    with refusing():
        typer.echo(start_new_lineage(settings), err=True)


def backup(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    config: Config = None,
    sets: Sets = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Write database and objects, as one moment saw them, into a new folder. Services go on meanwhile.

    Everything is read back and compared. Exit code 1: done, but objects were lost or damaged before.
    """
    from gpubroker_server.bootstrap.backups import back_up
    from gpubroker_server.bootstrap.commands import refusing

    settings = _settings(config, sets, data_dir=data_dir, database_url=database_url)
    with refusing():
        is_complete = back_up(settings, folder, lambda line: typer.echo(line, err=True))
    if not is_complete:
        raise typer.Exit(1)


def restore(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that `gpubroker backup` wrote.")],
    config: Config = None,
    sets: Sets = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Bring a backup to where there is no database and no objects, also to another kind of database.

    The service is stopped meanwhile; runs go on. Those that started after the backup are ended later.
    """
    from gpubroker_server.bootstrap import backups
    from gpubroker_server.bootstrap.commands import refusing

    settings = _settings(config, sets, data_dir=data_dir, database_url=database_url)
    with refusing():
        backups.restore(settings, folder, lambda line: typer.echo(line, err=True))


def migrate_data(
    target: Annotated[str, typer.Option("--to", help="An empty database: postgresql://user@host/name.")],
    source: Annotated[
        str | None, typer.Option("--from", help="sqlite:///path; default: the configured one.")
    ] = None,
    config: Config = None,
    sets: Sets = None,
    data_dir: DataDir = None,
) -> None:
    """Move a stopped service from its SQLite file to PostgreSQL: everything, or nothing.

    Every table is compared after the copy, and the file is never served again. If the command is interrupted,
    run it again. Runs continue meanwhile.
    """
    from gpubroker_server.bootstrap.commands import move_database, refusing

    settings = _settings(config, sets, data_dir=data_dir, database_url=source)
    with refusing():
        move_database(settings, target, lambda line: typer.echo(line, err=True))


def openapi() -> None:
    """Print the OpenAPI document as YAML."""
    from gpubroker_server.bootstrap.commands import openapi_yaml

    typer.echo(openapi_yaml(), nl=False)


def _run(settings: Settings, *, speaks: bool, leads: bool) -> None:
    gc.disable()  # it takes a tenth of a start and finds nothing; see `make_full_collections_rare`
    import structlog

    from gpubroker_server.bootstrap.commands import run_service
    from gpubroker_server.bootstrap.start_checks import StartRefused

    try:
        raise typer.Exit(run_service(settings, speaks=speaks, leads=leads))
    except StartRefused as refused:
        if settings.log_format == "json":
            structlog.get_logger("gpubroker").error("the start was refused", fault=str(refused))
            raise typer.Exit(2) from None
        raise _refused(str(refused)) from None


COMMANDS = (
    serve,
    gateway,
    broker,
    health,
    doctor,
    down,
    migrate,
    migrate_data,
    backup,
    restore,
    new_lineage,
    openapi,
)


def commands(app: typer.Typer) -> None:
    """Add the server's commands to a command line. Entry point of group `gpubroker.commands`."""
    for command in COMMANDS:
        app.command()(command)
    app.add_typer(cluster, name="cluster")
    app.add_typer(config_, name="config")


def main() -> None:
    app = typer.Typer(no_args_is_help=True, add_completion=False)
    commands(app)
    app()


def _settings(config: Path | None, sets: Sequence[str] | None, **flags: Any) -> Settings:
    try:
        return load_settings(config, sets=sets or (), **flags)
    except SettingsRefused as refused:
        raise _refused(str(refused)) from None


def _refused(message: str) -> typer.Exit:
    typer.echo(f"gpubroker: {message}", err=True)
    return typer.Exit(2)


if __name__ == "__main__":
    main()
