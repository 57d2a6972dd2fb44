"""Directories become objects: they are packed here, and sent only if the service does not have them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gpubroker.errors import Refused, WrongArgument
from gpubroker.runtime.archives import ArchiveLimits
from gpubroker.runtime.objects import ObjectRef
from gpubroker.tasks.environments import LOCK, PROJECT, project_to_store, with_project
from gpubroker.tasks.object_api import upload_call
from gpubroker.tasks.submission import DEFAULTS, SubmitOptions
from gpubroker.transport.exchange import Answer, Call, Steps

if TYPE_CHECKING:
    from gpubroker.uploads.archive import Archive

Send = Callable[[Call], Steps[Answer]]


def directory_stored(send: Send, directory: Any) -> Steps[ObjectRef]:
    """Store the archive of a directory and return its object. Raises WrongArgument for what cannot be sent,
    and Refused (`objects-full`) if the tenant's limit is reached."""
    from gpubroker.uploads.archive import archive_of  # imports pathspec, which only uploads need

    if not isinstance(directory, str | os.PathLike):
        raise WrongArgument(f"upload must be a directory, such as '.', not {directory!r}")
    rules = (yield from send(Call("GET", "/policy"))).json()
    # A service of an earlier release names no limits, and takes no uploads.
    limits = ArchiveLimits(rules.get("upload_bytes", 0) or 2**62, rules.get("upload_files", 0) or 2**31)
    return (yield from _stored(send, archive_of(Path(directory), limits)))


def with_stored(
    send: Send, target: Any, options: SubmitOptions, known: dict[str, ObjectRef] | None = None
) -> Steps[SubmitOptions]:
    """Return the options of a submission with objects in place of the directory that it uploads and of the
    project of its environment. `known` maps directories that are already stored to their objects. Raises
    WrongArgument and Refused."""
    known = {} if known is None else known
    given = {**getattr(target, DEFAULTS, {}), **options}
    stored: dict[str, Any] = {}
    upload, environment = given.get("upload"), given.get("environment")
    if upload is not None and not isinstance(upload, ObjectRef):
        if str(upload) not in known:
            known[str(upload)] = yield from directory_stored(send, upload)
        stored["upload"] = known[str(upload)]
    if (project := project_to_store(environment)) is not None:
        key = f"{project}/{LOCK}"
        if key not in known:
            known[key] = yield from _project_stored(send, project)
        stored["environment"] = with_project(environment, known[key])
    return cast("SubmitOptions", {**options, **stored})


def _project_stored(send: Send, directory: Path) -> Steps[ObjectRef]:
    from gpubroker.uploads.archive import archive_of_files

    return (yield from _stored(send, archive_of_files(directory, (PROJECT, LOCK))))


def _stored(send: Send, archive: "Archive") -> Steps[ObjectRef]:
    try:
        yield from send(Call("GET", f"/objects/{archive.id}"))
    except Refused as unknown:
        if unknown.code != "not-found":
            raise
    else:
        return ObjectRef(archive.id, archive.size_bytes)
    stored = (yield from send(upload_call(archive))).json()
    return ObjectRef(stored["id"], stored["size_bytes"])  # of a large archive: a file may have changed
