"""`gpubroker backup` and `gpubroker restore`. A backup is a folder with the rows of one moment and the
objects that they name.

The rows are copied first, and then the objects. If objects were deleted in between, the rows are read again;
if that happens repeatedly, uploads that their tenants deleted are left out. `backup.json` is written last,
and a folder without it is no backup.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpubroker_server.adapters.blobs.directory import copy_objects, sync_folder
from gpubroker_server.adapters.sql.copying.backup import (
    BackupFacts,
    check_is_free,
    named_in,
    restore_backup,
    write_backup,
)
from gpubroker_server.adapters.sql.session import DatabaseRefused
from gpubroker_server.bootstrap.object_store import name_anew
from gpubroker_server.bootstrap.start_checks import StartRefused, prepare_data_dir, write_private
from gpubroker_server.settings.loading import Settings

Report = Callable[[str], None]

_ROWS, _OBJECTS, _ABOUT = "gpubroker.db", "blobs", "backup.json"
_FORM = 1
_TRIES = 3
_RESTORING = ".restoring"
"""A file that marks a directory of objects whose restore was interrupted and may begin again."""


def back_up(settings: Settings, folder: Path, report: Report) -> bool:
    """Write a backup. Returns False if an object that was lost or damaged before is missing in it. Raises
    StartRefused."""
    with _plain_errors(folder):
        _make_empty(folder)
        for _ in range(_TRIES):
            (folder / _ROWS).unlink(missing_ok=True)
            facts = write_backup(settings.database, folder / _ROWS, report)
            lost = copy_objects(settings.objects, folder / _OBJECTS, sorted(facts.digests))
            deleted = lost - named_in(settings.database, lost)
            if not deleted:
                break
        if deleted - facts.uploads:
            raise StartRefused("objects are deleted more quickly than they are copied; try again")
        about = {
            "form": _FORM,
            "gpubroker": version("gpubroker-server"),
            "at": facts.at,
            "rows_sha256": _sha256(folder / _ROWS),
            "objects": len(facts.digests - lost),
            "missing_objects": sorted(lost),
        }
        write_private(folder / _ABOUT, json.dumps(about, indent=2))
        sync_folder(folder)
    for digest in sorted(lost - deleted):
        report(f"object {digest} is missing or damaged in {settings.objects}, so it is not in the backup")
    report(f"{folder} holds everything up to {_time(facts.at)}: {_told(facts)}")
    return lost == deleted


def restore(settings: Settings, folder: Path, report: Report) -> None:
    """Restore a backup to a place without a database and objects. Raises StartRefused; the service then
    cannot start from the place."""
    with _plain_errors(folder):
        about = _about(folder)
        prepare_data_dir(settings.data_dir)
        check_is_free(settings.database)
        _begin_objects(settings.objects)
        facts = _restore_all(settings, folder, about, report)
        (settings.objects / _RESTORING).unlink()
    taken_at = _time(about["at"])
    report(f"restored as of {taken_at}, in a new lineage: {_told(facts)}")
    report(
        "start the service. Runs of that time that are alive go on, and the others start again; what began "
        f"after {taken_at} is ended as nodes answer, and the service's log names each of these runs"
    )


def _restore_all(settings: Settings, folder: Path, about: Mapping[str, Any], report: Report) -> BackupFacts:
    objects = settings.objects

    def copy(digests: frozenset[str]) -> str:
        lost = copy_objects(folder / _OBJECTS, objects, sorted(digests - set(about["missing_objects"])))
        if lost:
            raise StartRefused(
                f"{folder} is damaged: {len(lost)} of its {len(digests)} objects are missing or differ from "
                f"their digest, such as {min(lost)}; restore another backup"
            )
        return name_anew(objects)

    return restore_backup(folder / _ROWS, settings.database, copy, report)


def _make_empty(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise StartRefused(f"{folder} is not empty; name a new folder for each backup")


def _about(folder: Path) -> Mapping[str, Any]:
    try:
        about: Mapping[str, Any] = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StartRefused(
            f"{folder} is no finished backup: it has no {_ABOUT}; name the folder of one that `gpubroker "
            "backup` has finished"
        ) from None
    if about["form"] != _FORM:
        raise StartRefused(
            f"{folder} was written by gpubroker {about['gpubroker']} in a form that this release does not "
            "read; restore it with that release"
        )
    if _sha256(folder / _ROWS) != about["rows_sha256"]:
        raise StartRefused(
            f"{folder / _ROWS} is damaged: it is not what `gpubroker backup` wrote; restore another backup"
        )
    return about


def _begin_objects(objects: Path) -> None:
    objects.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(objects.iterdir()) and not (objects / _RESTORING).exists():
        raise StartRefused(
            f"{objects} is not empty, and objects are restored where there are none; move it away, or name "
            "another directory with blob_dir"
        )
    (objects / _RESTORING).touch()
    (objects / ".gpubroker").unlink(missing_ok=True)


def _told(facts: BackupFacts) -> str:
    states = ", ".join(f"{number} {state}" for state, number in sorted(facts.tasks.items()))
    return f"tasks {states or 'that have ended'}; {len(facts.digests)} objects"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(sep=" ", timespec="seconds")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _plain_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except DatabaseRefused as refused:
        raise StartRefused(str(refused)) from None
    except (OSError, ValueError, KeyError) as error:
        raise StartRefused(f"{folder} cannot be used: {error}; give this user access, or make room") from None
