"""Directories of runs on one node, without Ray: unpacked once, copied for each run, collected and removed."""

import hashlib
import os
import pwd
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from gpubroker.runtime.archives import ArchiveLimits, unpack
from gpubroker.runtime.messages import RunKey, RunOutcome, ended
from gpubroker.uploads.archive import archive_of
from gpubroker_server.adapters.ray.agent.run_directories import work_directory
from gpubroker_server.adapters.ray.agent.uploads import Owner, UploadCache, remove_tree

from tests.client.test_archives import tar_of
from tests.contracts.fake_runners import FakeRunners, Leader, a_leader

LIMITS = ArchiveLimits(2**20, 100)
DONE = RunOutcome("succeeded", result=b"null")


def archive(folder: Path, **files: str) -> bytes:
    """The archive of a new directory with these files."""
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return b"".join(archive_of(folder, LIMITS).parts())


class Node:
    """One agent and its leader, which has one archive."""

    def __init__(self, runners: FakeRunners, folder: Path) -> None:
        self.runners, self.folder = runners, folder
        self.data = archive(folder / "uploaded", program="x = 1", notes="n")
        self.id = hashlib.sha256(self.data).hexdigest()
        self.leader: Leader = a_leader(runners, folder, spares=2)

    async def starts(self, task: str, **order: Any) -> None:
        await self.leader.start(task, tenant="acme", upload=self.id, **order)

    async def gets(self, task: str, data: bytes | None = None, failure: str = "") -> None:
        """The node asks for the archive on behalf of this task, and gets it."""
        assert (await self.leader.receive("wanted", task))[5:] == (self.id, 0)
        data = self.data if data is None else data
        await self.leader.order("object", task, 1, 0, self.id, len(data), 0, data, failure)

    async def directory_of(self, task: str) -> Path:
        """Where the run works, once its process has its order."""
        await self.leader.until(lambda: task in self.runners.started)
        [order] = [item[1] for item in self.runners.runner_of(task).items if item[0] == "own"]
        return Path(order["working_directory"])

    async def ends(self, task: str) -> None:
        self.runners.runner_of(task).report(ended(RunKey(task, 1, 0), DONE, b""))
        await self.leader.receive("gone", task)

    @property
    def runs(self) -> list[Path]:
        """What is left of directories of runs."""
        return list((work_directory(self.leader.config) / "runs").glob("*"))


@pytest.fixture
async def node(runners: FakeRunners, tmp_path: Path) -> Node:
    node = Node(runners, tmp_path)
    await node.leader.announce()
    return node


async def test_upload_is_fetched_once_and_each_run_has_a_copy_that_goes_with_it(node: Node) -> None:
    await node.starts("a")
    await node.gets("a")
    first = await node.directory_of("a")
    await node.starts("b")
    second = await node.directory_of("b")
    assert [report[1] for report in node.leader.received if report[0] == "wanted"] == ["a"]
    assert first != second
    assert {path.name for path in second.iterdir()} == {"program", "notes"}
    assert (first / "program").stat().st_ino != (second / "program").stat().st_ino
    (first / "program").write_text("changed")
    assert (second / "program").read_text() == "x = 1"
    for task in "ab":
        await node.ends(task)
    await node.leader.until(lambda: not first.exists() and not second.exists())
    await node.leader.until(lambda: node.runs == [])


async def test_run_that_is_stopped_while_its_upload_comes_never_starts(node: Node) -> None:
    await node.starts("a")
    await node.leader.receive("wanted", "a")
    await node.leader.stop("a")
    assert (await node.leader.receive("ended", "a"))[5] == "never_started"
    await node.gets("a")
    await node.starts("b")
    await node.gets("b")
    await node.directory_of("b")
    assert "a" not in node.runners.started
    assert [path.name for path in node.runs if path.is_dir()] == ["b-1-0"]


@pytest.mark.parametrize(
    ("data", "failure", "kind", "said"),
    [
        (b"", "it was deleted", "object_missing", "it was deleted"),
        (b"other", "", "object_missing", "damaged"),
    ],
)
async def test_run_whose_upload_cannot_be_had_fails_and_holds_nothing(
    node: Node, data: bytes, failure: str, kind: str, said: str
) -> None:
    await node.starts("a")
    await node.gets("a", data, failure)
    report = await node.leader.receive("ended", "a")
    assert (report[5], report[8][0]) == ("failed", kind)
    assert said in report[8][1]
    assert (await node.leader.receive("gone", "a"))[5] == "never_started"
    assert node.runs == []


async def test_archive_that_leads_out_fails_the_run_with_its_member(
    runners: FakeRunners, tmp_path: Path
) -> None:
    node = Node(runners, tmp_path)
    node.data = tar_of({"name": "../../x", "data": b"x"}).getvalue()
    node.id = hashlib.sha256(node.data).hexdigest()
    await node.leader.announce()
    await node.starts("a")
    await node.gets("a")
    report = await node.leader.receive("ended", "a")
    assert (report[5], report[8][0]) == ("failed", "object_unreadable")
    assert node.id in report[8][1]
    assert "'../../x' leads out of the directory" in report[8][1]


async def test_outputs_are_sent_in_parts_and_the_copy_goes_when_they_are_stored(node: Node) -> None:
    await node.starts("a", outputs=("made/**",))
    await node.gets("a")
    directory = await node.directory_of("a")
    (directory / "made").mkdir()
    (directory / "made" / "large").write_bytes(os.urandom(5 * 2**20))
    await node.ends("a")
    first = await node.leader.receive("output", "a")
    id, size_bytes, begin, data, files, message, name = first[5:]
    assert (begin, len(data), files, message, name) == (0, 4 * 2**20, 1, "", "n1")
    node.leader.received.clear()
    await node.leader.order("output", "a", 1, 0, id, len(data), False)
    second = await node.leader.receive("output", "a")
    assert second[7] == len(data)
    whole = data + second[8]
    assert (len(whole), hashlib.sha256(whole).hexdigest()) == (size_bytes, id)
    assert directory.exists(), "until the leader has all of it"
    await node.leader.order("output", "a", 1, 0, id, size_bytes, True)
    await node.leader.until(lambda: node.runs == [])
    target = node.folder / "target"
    target.mkdir()
    unpack(BytesIO(whole), target, ArchiveLimits(2**30, 10))
    assert (target / "made" / "large").stat().st_size == 5 * 2**20


def forget_records(node: Node) -> None:
    for record in Path(node.leader.config.run_dir, "n1").glob("*.json"):
        record.unlink()


async def test_next_agent_collects_and_removes_what_the_last_one_left(node: Node) -> None:
    await node.starts("a", outputs=("notes",))
    await node.gets("a")
    directory = await node.directory_of("a")
    left = directory.parent / "half-made"
    left.mkdir()
    process = node.runners.runner_of("a").process
    process.kill()
    process.wait()
    forget_records(node)  # nothing is known of the run but its directory
    next_leader = a_leader(node.runners, node.folder, spares=2)
    next_leader.term = 2
    await next_leader.announce()
    output = await next_leader.receive("output", "a")
    assert output[9] == 1
    assert not left.exists()
    await next_leader.order("output", "a", 1, 0, output[5], output[6], True)
    await next_leader.until(lambda: not directory.exists())


async def test_another_leader_is_sent_outputs_that_were_not_stored(node: Node) -> None:
    await node.starts("a", outputs=("notes",))
    await node.gets("a")
    await node.directory_of("a")
    await node.ends("a")
    first = await node.leader.receive("output", "a")
    node.leader.received.clear()
    node.leader.term = 2
    await node.leader.announce()
    assert (await node.leader.receive("output", "a"))[5:] == first[5:]


@pytest.fixture
def cache(tmp_path: Path) -> Callable[[int], UploadCache]:
    return lambda most_bytes: UploadCache(tmp_path / "cache", LIMITS, most_bytes)


def test_cache_drops_what_was_used_longest_ago(cache: Callable[[int], UploadCache], tmp_path: Path) -> None:
    kept = cache(30_000)
    packed = {name: bytearray(archive(tmp_path / name, f=name)) for name in "abcd"}
    times = iter(range(1, 9))

    def add(name: str) -> Path:
        path = kept.add("acme", name * 64, packed[name])
        os.utime(path.with_suffix(".size"), (at := next(times), at))
        return path

    for name in "abc":
        add(name)
    kept.copy(Path(kept.find("acme", "a" * 64) or ""), tmp_path / "copy", None)
    add("d")
    assert [name for name in "abcd" if kept.find("acme", name * 64)] == ["a", "c", "d"]
    assert kept.find("zeta", "a" * 64) is None, "each tenant has its own"


def test_cache_forgets_what_was_not_finished(cache: Callable[[int], UploadCache], tmp_path: Path) -> None:
    kept = cache(30_000)
    path = kept.add("acme", "a" * 64, bytearray(archive(tmp_path / "a", f="x")))
    path.with_suffix(".size").unlink()
    cache(30_000).clean()
    assert not path.exists()


def test_copy_belongs_to_the_user_and_keeps_modes_and_links(
    cache: Callable[[int], UploadCache], tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "run.sh").write_text("x")
    (folder / "run.sh").chmod(0o755)
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("run.sh")
    packed = b"".join(archive_of(folder, LIMITS).parts())
    source = cache(2**20).add("acme", "a" * 64, bytearray(packed))
    nobody = pwd.getpwnam("nobody")
    owner = Owner(nobody.pw_uid, nobody.pw_gid) if os.geteuid() == 0 else None
    cache(2**20).copy(source, tmp_path / "copy", owner)
    for name in ("", "run.sh", "empty", "link"):
        status = (tmp_path / "copy" / name).lstat()
        assert status.st_uid == (os.geteuid() if owner is None else owner.uid)
    assert (tmp_path / "copy" / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "copy" / "link").readlink() == Path("run.sh")


def test_directories_that_a_run_has_closed_are_removed() -> None:
    nobody = pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else os.geteuid()
    outside = Path("/dev/shm") / f"gpubroker-{os.getpid()}-outside"
    outside.mkdir(mode=0o755)
    real = os.geteuid()
    os.seteuid(nobody)
    try:
        left = Path("/dev/shm") / f"gpubroker-{os.getpid()}-left"
        (left / "a" / "b").mkdir(parents=True)
        (left / "a" / "b" / "file").touch()
        (left / "link").symlink_to(outside)
        (left / "a" / "b").chmod(0o000)
        (left / "a").chmod(0o500)
        remove_tree(str(left))
        assert not left.exists()
    finally:
        os.seteuid(real)
        assert outside.stat().st_mode & 0o777 == 0o755
        outside.rmdir()


async def test_run_that_is_stopped_while_its_copy_is_made_leaves_nothing(node: Node) -> None:
    await node.starts("a")
    await node.gets("a")
    await node.directory_of("a")
    await node.starts("b")  # its upload is here, so its copy begins at once
    await node.leader.stop("b")
    assert (await node.leader.receive("gone", "b"))[5] in ("never_started", "process_absent")
    await node.leader.until(lambda: [path.name for path in node.runs if path.is_dir()] == ["a-1-0"])
    await node.leader.until(lambda: len(node.runs) == 2)
