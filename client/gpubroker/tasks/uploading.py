"""Directories become objects: they are packed here, and sent only if the service does not have them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpubroker.errors import Refused, WrongArgument
from gpubroker.runtime.archives import ArchiveLimits
from gpubroker.runtime.objects import ObjectRef
from gpubroker.tasks.object_api import upload_call
from gpubroker.transport.exchange import Answer, Call, Steps

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
    archive = archive_of(Path(directory), limits)
    try:
        yield from send(Call("GET", f"/objects/{archive.id}"))
    except Refused as unknown:
        if unknown.code != "not-found":
            raise
    else:
        return ObjectRef(archive.id, archive.size_bytes)
    stored = (yield from send(upload_call(archive))).json()
    return ObjectRef(stored["id"], stored["size_bytes"])  # of a large archive: a file may have changed
