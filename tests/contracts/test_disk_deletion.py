"""What happens between a look at the disks of a node and a deletion, or meanwhile, and loses nothing. Needs
the right to mount."""

import fcntl
import os
import select
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from gpubroker_server.adapters.ray.agent import disk_cleaning
from gpubroker_server.core.domain.device import FileClass
from msgspec.structs import replace

from tests.contracts.guarded_node import Node, left, put, root
from tests.mounts import hung_mount
from tests.patience import PATIENCE_SECONDS


def test_what_takes_the_place_of_a_copied_file_stays(top: Path, tmp_path: Path) -> None:
    """Of the same size and age, while the sync command runs."""
    put(top / "copied")
    put(top / "other", b"y" * 100)
    script = "import os; print('100 copied', end='\\0'); os.replace('other', 'copied')"
    node = Node(tmp_path / "agent", root(top, FileClass.REDUNDANT, sys.executable, "-c", script))
    answer = node.ask()
    assert (answer.files, dict(answer.kept)) == ([], {"changed": 1, "not_synced": 1})


def test_sync_command_that_takes_too_long_is_ended_with_its_children(top: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    script = f"exec 3>{tmp_path / 'fifo'}; sleep 600 & echo 7 a; wait"
    ends = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    slow = replace(root(top, FileClass.REDUNDANT, "sh", "-c", script), sync_seconds=0.2)
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


def test_a_file_that_is_opened_after_it_was_found_stays(top: Path, tmp_path: Path) -> None:
    path = put(top / "old.log")
    node = Node(tmp_path / "agent", root(top))
    node.ask()
    found = tuple(node.ask().files)
    with path.open():
        assert dict(node.ask(found).kept) == {"open": 1}
    assert [file.path for file in node.ask(found).files] == ["old.log"]


def test_a_file_that_is_written_just_before_nothing_else_may_open_it_stays(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = put(top / "old.log"), fcntl.fcntl
    node = Node(tmp_path / "agent", root(top))
    node.ask()
    found = tuple(node.ask().files)

    def write_before(held: int, command: int, value: int = 0) -> int:
        if (command, value) == (fcntl.F_SETLEASE, fcntl.F_WRLCK):
            path.write_bytes(b"new")
        return lock(held, command, value)

    monkeypatch.setattr(fcntl, "fcntl", write_before)
    assert dict(node.ask(found).kept) == {"changed": 1}
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("meanwhile", ["another file gets its name", "another process waits to open it"])
def test_what_happens_just_before_a_deletion_loses_nothing(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    path, rename, jobs = put(top / "old.log"), os.rename, ThreadPoolExecutor(1)
    node = Node(tmp_path / "agent", root(top))
    node.ask()
    found = tuple(node.ask().files)

    def append() -> None:
        with path.open("ab") as file:
            file.write(b"new")

    def just_before(source: str, target: str, **directories: int) -> None:
        if meanwhile == "another file gets its name":
            put(top / "rotated", b"new").replace(path)
        else:
            waits.append(jobs.submit(append))
            while "BREAKING" not in Path("/proc/locks").read_text():
                time.sleep(0.001)
        rename(source, target, **directories)

    waits: list[Future[None]] = []
    monkeypatch.setattr(os, "rename", just_before)
    assert dict(node.ask(found).kept) == {"changed": 1}
    for job in waits:
        job.result(PATIENCE_SECONDS)
    assert path.read_bytes().endswith(b"new")
    assert left(top) == ["old.log"]


def test_a_file_with_another_hard_link_makes_no_room_and_stays(top: Path, tmp_path: Path) -> None:
    path = put(top / "old.log")
    node = Node(tmp_path / "agent", root(top))
    node.ask()
    found = tuple(node.ask().files)
    (top / "link.log").hardlink_to(path)
    assert dict(node.ask().kept) == {"has_links": 2}
    assert dict(node.ask(found).kept) == {"has_links": 1}


def test_files_other_processes_have_open_elsewhere_are_not_asked_about(top: Path, tmp_path: Path) -> None:
    """Their file system may not answer, such as a network file system whose server is away."""
    put(top / "old.log")
    with hung_mount(tmp_path / "away") as server, ThreadPoolExecutor(1) as thread:
        held = os.open(tmp_path / "away", os.O_PATH)
        try:
            looking = thread.submit(Node(tmp_path / "agent", root(top)).look)
            assert looking.result(PATIENCE_SECONDS) == ["old.log"]
        finally:
            server.close()
            os.close(held)


def test_where_the_kernel_does_not_know_what_is_open_everything_stays(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS, files may be open on another machine."""
    put(top / "old.log")
    node = Node(tmp_path / "agent", root(top))
    node.ask()
    found = tuple(node.ask().files)
    monkeypatch.setattr(fcntl, "F_SETLEASE", -1)  # a file system without leases
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
    for one in (by_name, of_another):
        assert not node.ask((one,)).files
    assert left(top) == ["a/old.log", "b/old.log"]
