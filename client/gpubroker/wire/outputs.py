"""The files that runs of a task have left."""

from typing import Annotated, Literal

from msgspec import Meta

from gpubroker.wire.answered import Answered, Time


class Output(Answered, frozen=True):
    """The files that were collected of one run, which is an attempt and a rank in it."""

    task: Annotated[str, Meta(description="Of an array or a worker set: the worker.")]
    attempt: int
    rank: int
    state: Annotated[
        Literal["collected", "empty", "pending"],
        Meta(description="`pending`: the run has not ended, or its node has not sent the files yet."),
    ]
    object: Annotated[
        str | None, Meta(description="Id of the object with the archive (tar); null if there is none.")
    ]
    files: int
    size_bytes: Annotated[int, Meta(description="Of the archive.")]
    collected_at: Time | None
    message: Annotated[str, Meta(description="What is missing, and why; empty if nothing is.")]


class Outputs(Answered, frozen=True):
    patterns: Annotated[tuple[str, ...], Meta(description="Which files are collected.")]
    items: Annotated[tuple[Output, ...], Meta(description="The latest attempt last.")]
