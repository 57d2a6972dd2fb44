"""`gpubroker cluster`: commands around a Ray cluster of several nodes on this machine."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from gpubroker.cli.printing import Format, Output

from gpubroker_server.settings.loading import default_data_dir

Name = Annotated[str, typer.Option(help="Name of the cluster: several may run side by side.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Directory of the clusters' state.")]

cluster = typer.Typer(
    no_args_is_help=True, help="Start a Ray cluster of several nodes on this machine, and add workers to it."
)


@cluster.command()
def start(
    workers: Annotated[int, typer.Option(min=0, help="Nodes besides the head.")] = 0,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="The head gets the first ones.")] = 1,
    simulated: Annotated[
        str | None,
        typer.Option(metavar="NxSIZE", help="Simulated GPUs, such as 3x24GiB; default: real ones."),
    ] = None,
    cpus_per_node: Annotated[int, typer.Option(min=1, help="CPUs that each node offers.")] = 1,
    worker_units: Annotated[
        float, typer.Option(min=0, help="Ray's resource worker_unit of each node.")
    ] = 1.0,
    object_store_mb: Annotated[int, typer.Option(min=75, help="Size of each node's object store.")] = 128,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the head; 0 takes a free one.")] = 0,
    name: Name = "local",
    data_dir: DataDir = None,
) -> None:
    """Start a head and workers, and keep them until Ctrl-C. Nothing of them is left then.

    \b
    gpubroker cluster start --workers 2 --simulated 4x24GiB
    """
    from gpubroker_server.bootstrap import clusters

    home = data_dir or default_data_dir()
    with _refusals():
        layout = clusters.layout_of(
            name, workers, gpus_per_node, simulated, cpus_per_node, worker_units, object_store_mb, port
        )
        fault = clusters.keep(home, layout, lambda line: typer.echo(line, err=True))
    if fault:
        typer.echo(f"gpubroker: {fault}", err=True)
        raise typer.Exit(1)


@cluster.command("add-worker")
def add(name: Name = "local", data_dir: DataDir = None) -> None:
    """Add a worker with the next GPUs. Returns when the node runs."""
    from gpubroker_server.adapters.ray.cluster.local_cluster import add_worker
    from gpubroker_server.bootstrap.clusters import in_words

    with _refusals():
        typer.echo(in_words(add_worker(data_dir or default_data_dir(), name)))


@cluster.command("status")
def show(name: Name = "local", data_dir: DataDir = None, output: Output = Format.TABLE) -> None:
    """Show the nodes of a cluster, and how to join it."""
    from gpubroker_server.adapters.ray.cluster.local_cluster import status
    from gpubroker_server.bootstrap.clusters import lines_of

    with _refusals():
        found = status(data_dir or default_data_dir(), name)
    if output is Format.TABLE:
        typer.echo("\n".join(lines_of(found)))
    else:
        typer.echo(json.dumps(found, indent=2 if output is Format.JSON else None))


@cluster.command()
def stop(name: Name = "local", data_dir: DataDir = None) -> None:
    """End a cluster with everything that runs there."""
    from gpubroker_server.adapters.ray.cluster.local_cluster import stop_cluster

    with _refusals():
        stop_cluster(data_dir or default_data_dir(), name)
    typer.echo(f"cluster {name} ended", err=True)


@contextmanager
def _refusals() -> Iterator[None]:
    from gpubroker_server.adapters.ray.cluster.local_cluster import ClusterRefused
    from gpubroker_server.bootstrap.start_checks import StartRefused

    try:
        yield
    except (ClusterRefused, StartRefused) as refused:
        typer.echo(f"gpubroker: {refused}", err=True)
        raise typer.Exit(2) from None
