"""The directory of large objects: the one that belongs to the database, whoever opens it."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from service.adapters.blobs.directory import DirectoryBlobs
from service.adapters.sql.store import SqlStore
from service.bootstrap.premises import StartRefused
from service.settings import Settings

_ID = ".gpubroker"
"""File in the directory that says which one it is, under whatever path it is mounted."""


async def open_blobs(settings: Settings, store: SqlStore) -> DirectoryBlobs:
    """Raises StartRefused for another directory than the one that holds what the database's rows name."""
    folder = settings.objects
    try:
        known = await store.blobs()
        own = _id_of(folder) or (_named(folder) if known is None else "")
    except OSError as error:
        raise StartRefused(
            f"cannot use {folder} for large objects: {error.strerror}; give it to this user, or name another "
            "with blob_dir"
        ) from None
    if (known := known or await store.claim_blobs(own)) != own:
        raise StartRefused(
            f"the objects of this database are not in {folder}, but in a directory whose file {_ID} says "
            f"{known}; name that one with blob_dir: all processes on one database share it"
        )
    limits = settings.limits
    most_bytes = max(limits.body_bytes, limits.result_bytes, limits.checkpoint_bytes)
    return DirectoryBlobs(folder, max_bytes=most_bytes)


def _id_of(folder: Path) -> str:
    """Empty if it has none."""
    with suppress(FileNotFoundError):
        return (folder / _ID).read_text(encoding="ascii").strip()
    return ""


def _named(folder: Path) -> str:
    """Give it an id, unless somebody was quicker."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = folder / f"{_ID}.{os.getpid()}"
    draft.write_text(f"{secrets.token_hex(8)}\n", encoding="ascii")
    with suppress(FileExistsError):
        os.link(draft, folder / _ID)
    draft.unlink()
    return _id_of(folder)
