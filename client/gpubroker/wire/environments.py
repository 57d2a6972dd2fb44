"""The environment of a task: the interpreter and the packages that its runs use."""

from typing import Annotated

from msgspec import Meta, Struct


class Environment(Struct, frozen=True, omit_defaults=True):
    """An environment that exists on the nodes (`python` or `conda`), that each node builds (`requirements` or
    `project`), or a container image. A field without a value is left out."""

    name: Annotated[str, Meta(description="The operator's environment of which these are the fields.")] = ""
    python: Annotated[
        str,
        Meta(
            description="The path of an interpreter, or of a virtual environment, on the nodes; or the "
            "version of the Python to install packages for."
        ),
    ] = ""
    conda: Annotated[str, Meta(description="The name or path of a conda environment on the nodes.")] = ""
    requirements: Annotated[
        tuple[str, ...], Meta(description="The packages to install, as lines of a requirements.txt.")
    ] = ()
    project: Annotated[
        str, Meta(description="Object with the archive of a pyproject.toml and its uv.lock.")
    ] = ""
    container: Annotated[str, Meta(description="The container image.")] = ""
