"""Containers: the words that run a command in an image with podman, Docker or Apptainer."""

import os
import shutil
from collections.abc import Sequence
from typing import NamedTuple

from gpubroker_server.adapters.environments.interpreters import CannotPrepare
from gpubroker_server.adapters.environments.processes import ProcessLimits, ProcessUser, run_limited
from gpubroker_server.settings.environments import BuildRules

CDI_GPU = "nvidia.com/gpu"
"""The kind of device by which the Container Device Interface names NVIDIA's GPUs."""


class ContainerRun(NamedTuple):
    """What a run has of its node inside a container."""

    name: str
    directory: str
    """The directory in which it works, under the same path inside; empty for that of the image."""
    user: str
    """`uid:gid` of the user as whom it runs; empty for the one that starts the engine."""
    gpus: Sequence[str]
    """The UUIDs of its GPUs."""
    mounts: Sequence[str]
    """The operator's data paths, which are the same inside."""
    variables: Sequence[str]
    """The names of the variables that are passed on. Their values never stand in a command line."""


def container_words(engine: str, image: str, run: ContainerRun) -> tuple[str, ...]:
    """Return the words before a command that run it in a container. `engine` is the path of the program.

    The container shares the network of the node, as runs without one do. Its processes inherit the mark of
    the run among the variables, by which the agent finds them and proves them gone.
    """
    paths = [*([run.directory] if run.directory else []), *run.mounts]
    if os.path.basename(engine) == "apptainer":  # a string is wanted
        binds = [word for path in paths for word in ("--bind", f"{path}:{path}")]
        place = ("--pwd", run.directory) if run.directory else ()
        gpus = ("--nv",) if run.gpus else ()
        # Apptainer passes all variables on, and runs the command in its own process.
        return (engine, "exec", "--no-home", *binds, *place, *gpus, _source(image))
    is_podman = os.path.basename(engine) == "podman"
    # Without a cgroup of its own, a container stays in that of the run, whose limits then hold for it.
    cgroup = ("--cgroups=disabled",) if is_podman else ()
    return (
        engine, "run", "--rm", "--init", "--name", run.name, "--network=host", "--pull=never", *cgroup,
        *(("--user", run.user) if run.user else ()),
        *(("--workdir", run.directory) if run.directory else ()),
        *(word for path in paths for word in ("--volume", f"{path}:{path}")),
        *(word for uuid in run.gpus for word in ("--device", f"{CDI_GPU}={uuid}")),
        *(word for name in run.variables for word in ("--env", name)),
        image,
    )  # fmt: skip


def _source(image: str) -> str:
    """Return the name by which Apptainer finds an image in a registry."""
    return image if "://" in image or image.endswith(".sif") else f"docker://{image}"


async def fetch_image(image: str, rules: BuildRules, node: str) -> tuple[str, str]:
    """Fetch an image if the node lacks it, and return the path of the engine and the image. Raises
    CannotPrepare."""
    engine = shutil.which(rules.container_engine) if rules.container_engine else None
    if engine is None:
        raise CannotPrepare(
            f"node {node} has no program {rules.container_engine or 'for containers'}; install it there, or "
            "name the one that it has (environments.container_engine)"
        )
    if rules.container_engine == "apptainer":
        return engine, image  # it keeps images in a cache of its own when it first runs them
    limits = ProcessLimits(rules.build_memory_mb, rules.build_seconds)
    env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": os.environ.get("HOME", "/root")}
    there = await run_limited((engine, "image", "inspect", image), env, "/", ProcessUser(), limits)
    if there.code != 0:
        pulled = await run_limited((engine, "pull", image), env, "/", ProcessUser(), limits)
        if pulled.code != 0:
            raise CannotPrepare(
                f"image {image} cannot be fetched on node {node}: {pulled.output.strip()[-2000:]}"
            )
    return engine, image
