"""What the disk guard of a node finds on a small file system, with planted files that must survive. Needs the
right to mount."""

import os
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from gpubroker_server.adapters.ray.agent import disk_cleaning
from gpubroker_server.adapters.ray.agent.disk_walk import Walk
from gpubroker_server.core.domain.device import FileClass, FoundFile
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.contracts.guarded_node import DAY, WEEK, Node, left, put, root
from tests.mounts import mounted


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


@pytest.mark.parametrize("way", ["root", "link", "mount", "prefix", "above"])
def test_live_checkpoint_stays_however_its_task_and_the_root_name_it(
    top: Path, tmp_path: Path, way: str
) -> None:
    """`root`: a link is above the root. `mount`: a directory below the root is mounted elsewhere too."""
    job, linked, also = top / "real" / "ckpt" / "job", top / "linked", tmp_path / "also"
    linked.symlink_to(top / "real")
    for step in (1, 2, 3):
        put(job / f"step-{step}.pt", days=20 - step)
    live = {
        "root": job / "step-1.pt",
        "link": linked / "ckpt/job/step-1.pt",
        "mount": also / "step-1.pt",
        "prefix": job / "step-1",
        "above": top,
    }[way]
    node = Node(tmp_path / "agent", root(linked / "ckpt", FileClass.CHECKPOINT))
    node.ask()
    found = tuple(node.ask().files)
    assert [file.path for file in found] == ["job/step-1.pt", "job/step-2.pt"]
    node.live = (live,)
    stay = ["job/step-1.pt", *(["job/step-2.pt"] if way == "above" else [])]
    with mounted(also, "--bind", str(job)):
        looked, went = node.ask(), node.ask(found)
    for answer in (looked, went):
        assert answer.kept["of_live_task"] >= len(stay)
        assert not {file.path for file in answer.files} & set(stay)
    assert {f"real/ckpt/{path}" for path in stay} <= set(left(top))


def test_only_what_the_sync_command_lists_with_its_size_is_redundant(top: Path, tmp_path: Path) -> None:
    for name in ("copied", "another size", "not copied"):
        put(top / name)
    listing = "100 copied\0" + "99 another size\0" + "7 no such file\0"
    command = sys.executable, "-c", f"print({listing!r}, end='')"
    assert Node(tmp_path / "a", root(top, FileClass.REDUNDANT, *command)).look() == ["copied"]
    for fails in (
        f"print({listing!r}, end=''); raise SystemExit(3)",
        "print('100copied', end='\\0')",
        "print('100 copied')",
    ):
        node = Node(tmp_path / "b", root(top, FileClass.REDUNDANT, sys.executable, "-c", fails))
        answer = node.ask()
        assert (answer.files, answer.kept) == ([], {})
        assert "its sync command" in answer.message
    slow = root(top, FileClass.REDUNDANT, sys.executable, "-c", "import time; time.sleep(60)")
    answer = Node(tmp_path / "c", replace(slow, sync_seconds=0.01)).ask()
    assert "timed out" in answer.message


@pytest.mark.parametrize("file_class", [FileClass.LOG, FileClass.CHECKPOINT, FileClass.EMPTY_DATABASE])
def test_with_a_sync_command_only_what_was_copied_goes(
    top: Path, tmp_path: Path, file_class: FileClass
) -> None:
    job = top / "job"
    for name, days in (("copied", 10.0), ("other", 9.0), ("newest", 8.0)):
        if file_class is FileClass.EMPTY_DATABASE:
            a_database(job / name, rows=0, days=days)
        else:
            put(job / name, days=days)
    size = (job / "copied").stat().st_size
    command = sys.executable, "-c", f"print('{size} job/copied', end='\\0')"
    node = Node(tmp_path / "agent", root(top, file_class, *command))
    assert node.look() == ["job/copied"]
    assert node.ask(runs_sync=False).files == [], "nothing says that there is a copy"
    assert [file.path for file in node.clean().files] == ["job/copied"]
    assert left(top) == ["job/newest", "job/other"]


def test_a_copied_file_whose_name_has_lines_confirms_no_other_one(top: Path, tmp_path: Path) -> None:
    for name in ("x\n100 precious", "precious"):
        put(top / name)
    command = "find", "-name", "x*", "-printf", r"%s %P\0"
    node = Node(tmp_path / "agent", root(top, FileClass.REDUNDANT, *command))
    assert [file.path for file in node.clean().files] == ["x\n100 precious"]
    assert left(top) == ["precious"]


def test_names_that_are_no_text_are_left(top: Path, tmp_path: Path) -> None:
    put(top / os.fsdecode(b"caf\xe9.log"))
    put(top / "old.log")
    assert Node(tmp_path / "agent", root(top)).look() == ["old.log"]
    answer = Node(tmp_path / "agent", root(top, FileClass.CHECKPOINT)).ask()
    assert (answer.files, "not all of it could be read" in answer.message) == ([], True)


def test_an_unasked_pass_leaves_disks_that_have_room(top: Path, tmp_path: Path) -> None:
    """Another disk of the node is full."""
    roomy = put(top / "roomy" / "old.log").parent
    with mounted(top / "full", "-t", "tmpfs", "-o", "size=1m", "none"):
        put(top / "full" / "old.log", bytes(900_000))
        command = "sh", "-c", f"echo > {tmp_path}/synced"
        of_copies = root(put(top / "copies" / "copy").parent, FileClass.REDUNDANT, *command)
        node = Node(tmp_path / "agent", root(roomy), of_copies, root(top / "full"))
        for _ in range(2):
            answer = node.ask(above=0.8)
            assert [file.root for file in answer.files] == [str(top / "full")]
        assert not answer.is_first
        assert not (tmp_path / "synced").exists()
        assert node.ask().is_first  # nothing was said of the others yet


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
    assert f"{top}/link is a symbolic link, which is not followed; write {top}/real" in answer.message
    assert str(top / "missing") in answer.message


@pytest.mark.parametrize("fails", ["missing", "sync"])
def test_first_pass_at_a_root_is_the_first_to_see_what_may_be_deleted(
    top: Path, tmp_path: Path, fails: str
) -> None:
    put(top / "a" / "old.log")
    late = tmp_path / "late"
    command = "sh", "-c", f"test -e {late} && find -type f -printf '%s %P\\0'"
    node = Node(tmp_path / "agent", root(top / "a"), root(top / "b", FileClass.REDUNDANT, *command))
    if fails == "sync":
        put(top / "b" / "copied")
    else:
        late.touch()
    node.ask()
    answer = node.ask()
    assert (answer.is_first, [file.path for file in answer.files]) == (False, ["old.log"])
    assert str(top / "b") in answer.message
    status = put(top / "b" / "copied").stat()
    late.touch()
    copied = FoundFile(str(top / "b"), "copied", FileClass.REDUNDANT, 100, status.st_mtime_ns, status.st_ino)
    assert "first pass" in node.ask((copied,)).message
    first, second = node.ask(), node.ask()
    assert (first.is_first, second.is_first) == (True, False)
    assert (
        [file.path for file in first.files] == [file.path for file in second.files] == ["old.log", "copied"]
    )


def test_mount_below_a_root_is_left_even_if_of_the_same_file_system(top: Path, tmp_path: Path) -> None:
    """Volumes of containers are such mounts: parts of one disk."""
    put(top / "root" / "old.log")
    put(top / "elsewhere" / "precious.log")
    node = Node(tmp_path / "agent", root(top / "root"))
    with mounted(top / "root" / "volume", "--bind", str(top / "elsewhere")):
        assert node.look() == ["old.log"]
    with mounted(top / "root" / "old.log", "--bind", str(top / "elsewhere" / "precious.log")):
        assert node.look() == []


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


def test_pass_is_bounded_and_leaves_checkpoints_it_could_not_see_whole(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(6):
        put(top / "job" / f"{n}.pt")
    monkeypatch.setattr(disk_cleaning, "MAX_DELETED", 2)
    answer = Node(tmp_path / "agent", root(top)).ask()
    assert (len(answer.files), answer.kept["next_pass"]) == (2, 4)
    monkeypatch.setattr(disk_cleaning, "MAX_FILES", 5)
    cut = Node(tmp_path / "agent", root(top)).ask()
    assert "more than 5 files" in cut.message
    assert Node(tmp_path / "agent", root(top, FileClass.CHECKPOINT)).ask().files == []


def test_a_walk_reads_no_more_names_than_it_may(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(20):
        put(top / f"{n}.log")
    scandir = os.scandir
    read: list[os.DirEntry[str]] = []

    def noted(entry: os.DirEntry[str]) -> os.DirEntry[str]:
        read.append(entry)
        return entry

    @contextmanager
    def counted(directory: int) -> Iterator[Iterator[os.DirEntry[str]]]:
        with scandir(directory) as entries:
            yield map(noted, entries)

    monkeypatch.setattr(os, "scandir", counted)
    walk = Walk(str(top), 5, frozenset())
    walk.run()
    assert (len(walk.entries), walk.is_complete, len(read)) == (5, False, 6)


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
