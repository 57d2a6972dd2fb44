"""The disk guard of a node on a small file system of its own, with planted files that must survive.

Where this process may not mount one, the files lie in a plain directory.
"""

import os
import select
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from gpubroker_server.adapters.ray.agent import disk_cleaning, disk_walk
from gpubroker_server.adapters.ray.agent.disk_cleaning import Answer, DiskCleaner, DiskTask
from gpubroker_server.adapters.ray.agent.disk_walk import Walk
from gpubroker_server.core.domain.device import FileClass, FoundFile, WatchedRoot
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.mounts import mounted
from tests.patience import PATIENCE_SECONDS

DAY = 86_400.0
WEEK = 7 * DAY


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("disk")
    with mounted(place, "-t", "tmpfs", "-o", "size=4m", "none"):
        yield place


@pytest.fixture
def top(disk: Path, request: pytest.FixtureRequest) -> Path:
    place = disk / request.node.name.replace("[", "-").replace("]", "")
    place.mkdir()
    return place


def put(path: Path, data: bytes = b"x" * 100, *, days: float = 8.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    at = time.time() - days * DAY
    os.utime(path, (at, at))
    return path


def a_database(path: Path, *, rows: int, days: float = 8.0, mode: str = "delete") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA journal_mode = {mode}")
        database.execute('CREATE TABLE "a ""table" (n)')
        database.executemany('INSERT INTO "a ""table" VALUES (?)', [(n,) for n in range(rows)])
        database.commit()
    at = time.time() - days * DAY
    os.utime(path, (at, at))
    return path


class Node:
    """The guard of one node, asked as its agent is."""

    def __init__(self, folder: Path, *roots: WatchedRoot, live: tuple[Path, ...] = ()) -> None:
        self.folder = folder
        self.roots = roots
        self.live = live
        self.spared: tuple[Path, ...] = ()
        self.guard = DiskCleaner(folder, lambda _: None)

    def ask(self, deletes: tuple[FoundFile, ...] | None = None, **changes: Any) -> Answer:
        paths = tuple(map(str, self.live))
        spared = tuple(map(str, self.spared))
        task = DiskTask("r", self.roots, spared, 0.0, WEEK, deletes, runs_sync=True, live=paths)
        return self.guard.answer(task._replace(**changes))

    def look(self) -> list[str]:
        return sorted(file.path for file in self.ask().files)

    def clean(self) -> Answer:
        self.ask()
        return self.ask(tuple(self.ask().files))


def left(top: Path) -> list[str]:
    return sorted(
        str(path.relative_to(top)) for path in top.rglob("*") if path.is_file() or path.is_symlink()
    )


def root(top: Path, file_class: FileClass = FileClass.LOG, *sync: str) -> WatchedRoot:
    return WatchedRoot(str(top), file_class, sync)


def test_old_logs_go_and_open_and_young_ones_and_what_links_lead_to_stay(top: Path, tmp_path: Path) -> None:
    outside = put(tmp_path / "outside" / "precious.log")
    (top / "link.log").symlink_to(outside)
    (top / "linked").symlink_to(outside.parent)
    for name in ("old.log", "deep/er/old.log"):
        put(top / name)
    put(top / "young.log", days=6.9)
    node = Node(tmp_path / "agent", root(top))
    with put(top / "open.log").open():
        answer = node.clean()
    assert sorted(file.path for file in answer.files) == ["deep/er/old.log", "old.log"]
    assert left(top) == ["link.log", "linked", "open.log", "young.log"]
    assert outside.exists()


def test_the_first_pass_after_a_change_of_configuration_deletes_nothing(top: Path, tmp_path: Path) -> None:
    put(top / "old.log")
    node = Node(tmp_path / "agent", root(top))
    assert node.ask(runs_sync=False).is_first  # a look only
    first = node.ask()
    assert first.is_first
    assert not node.ask().is_first
    again = Node(tmp_path / "agent", root(top))  # the agent is replaced
    assert not again.ask().is_first
    other = again.ask(old_seconds=2 * WEEK)
    assert (other.is_first, other.files) == (True, [])
    changed = again.ask(tuple(first.files))
    assert "first pass" in changed.message
    assert left(top) == ["old.log"]


def test_only_databases_without_rows_go(top: Path, tmp_path: Path) -> None:
    a_database(top / "empty.db", rows=0)
    a_database(top / "empty-wal-mode.db", rows=0, mode="wal")
    a_database(top / "rows.db", rows=1)
    a_database(top / "with-wal.db", rows=0)
    put(top / "with-wal.db-wal", b"")
    a_database(top / "with-journal.db", rows=0)
    put(top / "with-journal.db-journal", b"")
    a_database(top / "young.db", rows=0, days=1)
    put(top / "notes.txt")
    put(top / "damaged.db", b"SQLite format 3\x00" + b"\xff" * 4000)
    node = Node(tmp_path / "agent", root(top, FileClass.EMPTY_DATABASE))
    assert node.look() == ["empty-wal-mode.db", "empty.db"]
    found = tuple(node.ask().files)
    put(top / "empty.db-wal", b"")
    answer = node.ask(found)
    assert ([file.path for file in answer.files], dict(answer.kept)) == (
        ["empty-wal-mode.db"],
        {"has_journal": 1},
    )


def test_the_newest_checkpoint_and_those_of_live_tasks_stay(top: Path, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        put(top / "job" / f"step-{step}.pt", days=20 - step)
        for part in ("model", "nested/optimizer"):
            put(top / "sharded" / f"step-{step}" / part, days=20 - step)
    alias = tmp_path / "alias"
    alias.symlink_to(top)
    node = Node(tmp_path / "agent", root(top, FileClass.CHECKPOINT), live=(alias / "job/step-1.pt",))
    node.clean()
    here = left(top)
    assert {"job/step-1.pt", "job/step-3.pt"} <= set(here)
    assert "job/step-2.pt" not in here
    assert {"sharded/step-3/model", "sharded/step-3/nested/optimizer"} <= set(here)
    node.live = (top / "job" / "step-1.pt",)
    put(top / "job" / "step-2.pt", days=18)
    found = tuple(file for file in node.ask().files if file.path == "job/step-2.pt")
    node.live = (top / "job",)  # a task has saved it meanwhile
    assert dict(node.ask(found).kept) == {"of_live_task": 1}


def test_only_what_the_sync_command_lists_with_its_size_is_redundant(top: Path, tmp_path: Path) -> None:
    for name in ("copied", "another size", "not copied"):
        put(top / name)
    lines = "100 copied\n99 another size\n7 no such file\n"
    command = sys.executable, "-c", f"print({lines!r}, end='')"
    assert Node(tmp_path / "a", root(top, FileClass.REDUNDANT, *command)).look() == ["copied"]
    for fails in (f"print({lines!r}); raise SystemExit(3)", "print('100copied')"):
        node = Node(tmp_path / "b", root(top, FileClass.REDUNDANT, sys.executable, "-c", fails))
        answer = node.ask()
        assert (answer.files, answer.kept) == ([], {"not_synced": 3})
        assert "its sync command" in answer.message
    slow = root(top, FileClass.REDUNDANT, sys.executable, "-c", "import time; time.sleep(60)")
    answer = Node(tmp_path / "c", slow._replace(sync_seconds=0.01)).ask()
    assert "timed out" in answer.message


def test_what_takes_the_place_of_a_copied_file_stays(top: Path, tmp_path: Path) -> None:
    """Of the same size and age, while the sync command runs."""
    put(top / "copied")
    put(top / "other", b"y" * 100)
    script = "import os; print(100, 'copied'); os.replace('other', 'copied')"
    node = Node(tmp_path / "agent", root(top, FileClass.REDUNDANT, sys.executable, "-c", script))
    answer = node.ask()
    assert (answer.files, dict(answer.kept)) == ([], {"changed": 1, "not_synced": 1})


def test_a_sync_command_that_takes_too_long_is_ended_with_all_that_it_has_started(
    top: Path, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    script = f"exec 3>{tmp_path / 'fifo'}; sleep 600 & echo 7 a; wait"
    ends = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    slow = root(top, FileClass.REDUNDANT, "sh", "-c", script)._replace(sync_seconds=0.2)
    assert "timed out" in Node(tmp_path / "agent", slow).ask().message
    assert select.select([ends], [], [], PATIENCE_SECONDS)[0], "no process has it open any more"
    os.close(ends)


def test_a_sync_command_that_prints_without_end_is_ended(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cleaning, "LISTING_BYTES", 1000)
    endless = root(top, FileClass.REDUNDANT, "yes", "7 a")
    assert "printed more than 1000 bytes" in Node(tmp_path / "agent", endless).ask().message


def test_a_directory_that_becomes_a_link_meanwhile_leads_nowhere(top: Path, tmp_path: Path) -> None:
    put(top / "logs" / "a.log")
    victim = put(tmp_path / "elsewhere" / "a.log")
    node = Node(tmp_path / "agent", root(top))
    node.ask()
    found = tuple(node.ask().files)
    (top / "logs").rename(top / "moved")
    (top / "logs").symlink_to(victim.parent)
    assert dict(node.ask(found).kept) == {"changed": 1}
    assert victim.exists()
    assert (top / "moved" / "a.log").exists()


def test_a_file_that_changes_meanwhile_stays(top: Path, tmp_path: Path) -> None:
    for name in ("replaced", "written", "touched", "linked", "opened", "same"):
        put(top / name)
    node = Node(tmp_path / "agent", root(top))
    node.ask()
    found = tuple(node.ask().files)
    (top / "replaced").unlink()
    put(top / "another").rename(top / "replaced")
    put(top / "written", b"y")
    put(top / "touched", days=1)
    (top / "linked").unlink()
    (top / "linked").symlink_to(top / "same")
    with (top / "opened").open():
        answer = node.ask(found)
    assert [file.path for file in answer.files] == ["same"]
    assert dict(answer.kept) == {"changed": 4, "open": 1}


def test_a_file_that_is_opened_after_the_look_at_all_processes_stays(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(top / "old.log")
    node = Node(tmp_path / "agent", root(top))
    node.ask()
    found = tuple(node.ask().files)
    monkeypatch.setattr(disk_cleaning, "open_files", frozenset)
    with path.open():
        assert dict(node.ask(found).kept) == {"open": 1}
    assert [file.path for file in node.ask(found).files] == ["old.log"]


def test_where_the_kernel_does_not_know_what_is_open_everything_stays(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS, files may be open on another machine."""
    put(top / "old.log")
    node = Node(tmp_path / "agent", root(top))
    node.ask()
    found = tuple(node.ask().files)
    monkeypatch.setattr(disk_walk.fcntl, "F_SETLEASE", -1)  # a file system without leases
    for answer in (node.ask(), node.ask(found)):
        assert (answer.files, dict(answer.kept)) == ([], {"may_be_open": 1})
    assert left(top) == ["old.log"]


def test_nothing_goes_that_the_order_does_not_cover(top: Path, tmp_path: Path) -> None:
    put(top / "a" / "old.log")
    outside = put(top / "b" / "old.log")
    node = Node(tmp_path / "agent", root(top / "a"))
    node.ask()
    [file] = node.ask().files
    status = outside.stat()
    by_name = file._replace(path="../b/old.log", inode=status.st_ino, modified_ns=status.st_mtime_ns)
    of_another = file._replace(root=str(top / "b"))
    assert not node.ask((by_name, of_another)).files
    assert left(top) == ["a/old.log", "b/old.log"]


def test_directories_of_the_service_are_left_whatever_they_are_called(top: Path, tmp_path: Path) -> None:
    put(top / "data" / "logs" / "old.log")
    put(top / "old.log")
    alias = tmp_path / "data"
    alias.symlink_to(top / "data")
    node = Node(tmp_path / "agent", root(top))
    node.spared = (alias,)
    assert node.look() == ["old.log"]
    inside = Node(tmp_path / "agent", root(top / "data" / "logs"))
    inside.spared = (alias,)
    answer = inside.ask()
    assert (answer.files, "directory of the service" in answer.message) == ([], True)


def test_a_root_that_is_a_link_or_missing_is_said(top: Path, tmp_path: Path) -> None:
    put(top / "real" / "old.log")
    (top / "link").symlink_to(top / "real")
    node = Node(tmp_path / "agent", root(top / "link"), root(top / "missing"), root(top / "real"))
    answer = node.ask()
    assert [file.path for file in answer.files] == ["old.log"]
    assert str(top / "link") in answer.message
    assert str(top / "missing") in answer.message


def test_what_is_mounted_below_a_root_is_left_also_from_the_same_file_system(
    top: Path, tmp_path: Path
) -> None:
    """As volumes of containers are: parts of one disk. Where this process may not mount, nothing is."""
    put(top / "root" / "old.log")
    put(top / "elsewhere" / "precious.log")
    node = Node(tmp_path / "agent", root(top / "root"))
    with mounted(top / "root" / "volume", "--bind", str(top / "elsewhere")):
        assert node.look() == ["old.log"]
    with mounted(top / "root" / "old.log", "--bind", str(top / "elsewhere" / "precious.log")) as is_mounted:
        assert node.look() == ([] if is_mounted else ["old.log"])


def test_other_file_systems_are_not_entered() -> None:
    """/dev has some below it on every machine."""
    mark = Path("/dev/shm") / f"gpubroker-test-{os.getpid()}"
    mark.write_bytes(b"")
    try:
        walk = Walk("/dev", 100_000, frozenset())
        walk.run()
        assert not [entry for entry in walk.entries if entry.path.startswith("shm/")]
    finally:
        mark.unlink()


def test_a_pass_is_bounded_and_leaves_checkpoints_that_it_could_not_see_whole(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(6):
        put(top / "job" / f"{n}.pt")
    monkeypatch.setattr(disk_cleaning, "MOST_DELETED", 2)
    answer = Node(tmp_path / "agent", root(top)).ask()
    assert (len(answer.files), answer.kept["next_pass"]) == (2, 4)
    monkeypatch.setattr(disk_cleaning, "MOST_FILES", 5)
    cut = Node(tmp_path / "agent", root(top)).ask()
    assert "more than 5 files" in cut.message
    assert Node(tmp_path / "agent", root(top, FileClass.CHECKPOINT)).ask().files == []


NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
KINDS = st.sampled_from(["old", "young", "link", "linked directory"])


@settings(max_examples=20, deadline=None)
@given(st.dictionaries(PATHS, KINDS, max_size=8))
def test_whatever_lies_there_just_the_old_files_below_the_root_go(
    tmp_path_factory: pytest.TempPathFactory, given_paths: dict[str, str]
) -> None:
    place = tmp_path_factory.mktemp("tree")
    top, outside = place / "root", put(place / "outside" / "a")
    top.mkdir()
    old = set()
    for path, kind in sorted(given_paths.items()):
        at = top / path
        try:
            at.parent.mkdir(parents=True, exist_ok=True)
            if at.resolve().parent != at.parent or at.exists():
                continue
            if kind == "link":
                at.symlink_to(outside)
            elif kind == "linked directory":
                at.symlink_to(outside.parent)
            else:
                put(at, days=8 if kind == "old" else 1)
        except (FileExistsError, NotADirectoryError):
            continue
        if kind == "old":
            old.add(path)
    before = set(left(top))
    gone = {file.path for file in Node(place / "agent", root(top)).clean().files}
    assert gone == old
    assert set(left(top)) == before - old
    assert outside.exists()
