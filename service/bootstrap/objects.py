"""The directory of large objects: the one that belongs to the database, whoever opens it."""

import asyncio
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


_OTHERS_SECONDS, _LOOKS = 3.0, 30
"""For another process of the same database, which has just given the directory its id, to note that there."""


async def open_blobs(settings: Settings, store: SqlStore) -> DirectoryBlobs:
    """Raises StartRefused for another directory than the one that holds what the database's rows name, and
    for one that holds what another database's rows name: each would throw away what the other needs."""
    folder = settings.objects
    try:
        known = await store.blobs()
        own, is_new = _id_of(folder), False
        if known is None and not own:
            own, is_new = _named(folder)
    except OSError as error:
        raise StartRefused(
            f"cannot use {folder} for large objects: {error.strerror}; give it to this user, or name another "
            "with blob_dir"
        ) from None
    if known is None:
        known = await (store.claim_blobs(own) if is_new or _is_alone(settings) else _noted(store, folder))
    if known != own:
        raise StartRefused(
            f"the objects of this database are not in {folder}, but in a directory whose file {_ID} says "
            f"{known}; name that one with blob_dir: all processes on one database share it"
        )
    limits = settings.limits
    most_bytes = max(limits.body_bytes, limits.result_bytes, limits.checkpoint_bytes)
    return DirectoryBlobs(folder, max_bytes=most_bytes)


def _is_alone(settings: Settings) -> bool:
    """The directory lies beside the file that is the database: no other database has it."""
    return settings.blob_dir is None and settings.database.startswith("sqlite:")


async def _noted(store: SqlStore, folder: Path) -> str:
    """What the database says of the directory by now. Raises StartRefused if that stays nothing."""
    for _ in range(_LOOKS):
        if (known := await store.blobs()) is not None:
            return known
        await asyncio.sleep(_OTHERS_SECONDS / _LOOKS)
    raise StartRefused(
        f"{folder} holds the large objects of another database: its file {_ID} was there before this one "
        "knew of any. Name another directory with blob_dir, or, if that database is no longer in use, remove "
        "the file"
    )


def _id_of(folder: Path) -> str:
    """Empty if it has none."""
    with suppress(FileNotFoundError):
        return (folder / _ID).read_text(encoding="ascii").strip()
    return ""


def _named(folder: Path) -> tuple[str, bool]:
    """Its id, and whether it has it from here: somebody else may be quicker."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = folder / f"{_ID}.{os.getpid()}"
    draft.write_text(f"{secrets.token_hex(8)}\n", encoding="ascii")
    try:
        os.link(draft, folder / _ID)
        return _id_of(folder), True
    except FileExistsError:
        return _id_of(folder), False
    finally:
        draft.unlink()
