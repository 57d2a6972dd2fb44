"""Opens the directory of large objects, and makes sure that it belongs to the database.

First the database gets a mark, then the directory gets a name that begins with this mark, then the database
gets the name. If the first start is interrupted, the next one recognizes the directory by the mark.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from gpubroker_server.adapters.blobs.directory import DirectoryBlobs, sync_folder
from gpubroker_server.adapters.sql.store import SqlStore
from gpubroker_server.bootstrap.start_checks import StartRefused
from gpubroker_server.settings.loading import Settings

_ID = ".gpubroker"
"""The file in the directory that contains the directory's name, which is independent of its path."""

_OPEN = "-"
"""The end of a mark. No name of a directory ends with it."""


async def open_blobs(settings: Settings, store: SqlStore) -> DirectoryBlobs:
    """Open the directory of objects. Raises StartRefused unless it belongs to this database, because a
    database deletes objects that its rows do not name."""
    folder = settings.objects
    known = await store.blobs() or await store.claim_blobs(f"{secrets.token_hex(8)}{_OPEN}", instead_of="")
    is_first = known.endswith(_OPEN)
    try:
        own_id = _id_of(folder) or (_named(folder, known) if is_first else "")
    except OSError as error:
        raise StartRefused(
            f"cannot use {folder} for large objects: {error.strerror}; give it to this user, or name another "
            "with blob_dir"
        ) from None
    if is_first:
        if not (own_id.startswith(known) or _is_alone(settings)):
            raise StartRefused(
                f"{folder} holds the large objects of another database, or of this one before it was "
                f"emptied: its file {_ID} was not created for this database. Name another directory with "
                "blob_dir. Only if no database needs these objects any more, remove the file; then they are "
                "deleted"
            )
        known = await store.claim_blobs(own_id, instead_of=known)
    if known != own_id:
        raise StartRefused(
            f"the objects of this database are not in {folder}, but in a directory whose file {_ID} says "
            f"{known}; name that one with blob_dir: all processes on one database share it"
        )
    limits = settings.limits
    # An inference that names objects is stored with their values.
    asked_bytes = limits.body_bytes + limits.copied_object_bytes
    most_bytes = max(asked_bytes, limits.object_bytes, limits.result_bytes, limits.checkpoint_bytes)
    return DirectoryBlobs(folder, max_bytes=most_bytes)


def _is_alone(settings: Settings) -> bool:
    """Return True if the directory is beside the SQLite file, so that no other database uses it."""
    return settings.blob_dir is None and settings.database.startswith("sqlite:")


def _id_of(folder: Path) -> str:
    """Return the name in a directory's file; empty if there is no file."""
    with suppress(FileNotFoundError):
        return (folder / _ID).read_text(encoding="ascii").strip()
    return ""


def name_anew(folder: Path) -> str:
    """Give a name to a directory that belongs to no database yet, and return the name."""
    return _named(folder, f"{secrets.token_hex(8)}{_OPEN}")


def _named(folder: Path, mark: str) -> str:
    """Give a name to a directory unless another process does so first, and return the name. It is then on
    disk."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    own_id = f"{mark}{secrets.token_hex(8)}"
    draft = folder / f"{_ID}.{own_id}"
    with draft.open("w", encoding="ascii") as file:
        file.write(f"{own_id}\n")
        file.flush()
        os.fsync(file.fileno())
    with suppress(FileExistsError):
        os.link(draft, folder / _ID)
    draft.unlink()
    sync_folder(folder)
    return _id_of(folder)
