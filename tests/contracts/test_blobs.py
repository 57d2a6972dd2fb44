"""Objects in a directory: what is handed out has the digest that was asked for, or nothing is."""

import asyncio
import hashlib
import os
import stat
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from gpubroker_server.adapters.blobs.directory import DirectoryBlobs, Referenced
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.ports.store import BlobCorrupt, BlobMissing, BlobTooLarge, StoreUnavailable, TaskStore

from tests.builders import a_task
from tests.contracts.scenes import a_checkpoint, a_submission, admission, claimed, end, with_gpu
from tests.full_disk import file_size_limit
from tests.patience import PATIENCE_SECONDS

DIGEST = hashlib.sha256(b"weights").hexdigest()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "blobs"


@pytest.fixture
def blobs(root: Path) -> DirectoryBlobs:
    return DirectoryBlobs(root, max_bytes=1000)


def files_below(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def folders_below(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_dir()]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_an_object_comes_back_by_the_digest_of_its_bytes(blobs: DirectoryBlobs) -> None:
    assert await blobs.put(b"weights", owner="t1") == DIGEST
    assert await blobs.get(DIGEST) == b"weights"


async def test_an_empty_object_is_an_object(blobs: DirectoryBlobs) -> None:
    assert await blobs.get(await blobs.put(b"", owner="t1")) == b""


async def test_equal_objects_are_kept_once(blobs: DirectoryBlobs, root: Path) -> None:
    digests = await asyncio.gather(*(blobs.put(b"weights", owner=f"t{n}") for n in range(8)))
    assert set(digests) == {DIGEST}
    assert files_below(root) == [root / DIGEST[:2] / DIGEST[2:4] / DIGEST]


async def test_other_users_cannot_read_blobs(blobs: DirectoryBlobs, root: Path) -> None:
    await blobs.put(b"weights", owner="t1")
    folders = [root, *folders_below(root)]
    assert {mode_of(folder) for folder in folders} == {0o700}
    assert {mode_of(file) for file in files_below(root)} == {0o600}


async def test_an_unknown_object_is_missing(blobs: DirectoryBlobs) -> None:
    with pytest.raises(BlobMissing, match=DIGEST):
        await blobs.get(DIGEST)


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "ab", "AB" * 32, "zz" * 32, "a" * 63 + "/"])
async def test_an_invalid_digest_is_missing_and_names_no_path(blobs: DirectoryBlobs, digest: str) -> None:
    with pytest.raises(BlobMissing):
        await blobs.get(digest)
    with pytest.raises(BlobMissing):
        await blobs.delete(digest)


@pytest.mark.parametrize("damage", [b"weightz", b"weight", b"", b"weights\0"])
async def test_damaged_bytes_are_not_returned(blobs: DirectoryBlobs, root: Path, damage: bytes) -> None:
    await blobs.put(b"weights", owner="t1")
    files_below(root)[0].write_bytes(damage)
    with pytest.raises(BlobCorrupt, match="restore it from a backup"):
        await blobs.get(DIGEST)


async def test_putting_an_object_again_repairs_a_damaged_one(blobs: DirectoryBlobs, root: Path) -> None:
    await blobs.put(b"weights", owner="t1")
    files_below(root)[0].write_bytes(b"damaged")
    await blobs.put(b"weights", owner="t2")
    assert await blobs.get(DIGEST) == b"weights"


async def test_an_object_that_is_too_large_is_refused_and_leaves_nothing(
    blobs: DirectoryBlobs, root: Path
) -> None:
    with pytest.raises(BlobTooLarge, match="t1 gave an object of 1001 bytes; at most 1000"):
        await blobs.put(b"x" * 1001, owner="t1")
    assert files_below(root) == []
    await blobs.put(b"x" * 1000, owner="t1")


async def test_a_deleted_object_is_gone(blobs: DirectoryBlobs) -> None:
    await blobs.put(b"weights", owner="t1")
    await blobs.delete(DIGEST)
    await blobs.delete(DIGEST)
    with pytest.raises(BlobMissing):
        await blobs.get(DIGEST)


async def test_an_object_that_was_put_again_is_left_to_the_sweep(blobs: DirectoryBlobs, root: Path) -> None:
    """A row that is on its way may name it."""
    for again in (b"weights", b"damaged"):
        await blobs.put(b"weights", owner="t1")
        files_below(root)[0].write_bytes(again)
        await blobs.put(b"weights", owner="t2")
        await blobs.delete(DIGEST)
        assert await blobs.get(DIGEST) == b"weights"
        grow_old(root)
        assert await blobs.sweep(naming(), age_seconds=HOUR) == 1
    for _ in range(2):
        await blobs.append("up-1", 0, b"weights")
        await blobs.finish("up-1", DIGEST)
    await blobs.delete(DIGEST)
    assert await blobs.get(DIGEST) == b"weights"


async def test_an_object_that_is_put_again_while_it_is_deleted_survives(
    blobs: DirectoryBlobs, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await blobs.put(b"weights", owner="t1")
    rename = os.rename

    def put_again_first(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        blobs.put_now(b"weights")
        rename(source, target)

    monkeypatch.setattr(os, "rename", put_again_first)
    await blobs.delete(DIGEST)
    assert [path.name for path in files_below(root)] == [DIGEST]


async def test_an_object_that_cannot_be_written_leaves_nothing_behind(
    blobs: DirectoryBlobs, root: Path
) -> None:
    await blobs.put(b"weights", owner="t1")
    path = files_below(root)[0]
    path.unlink()
    path.mkdir()  # nothing can be renamed onto it
    (path / "inside").touch()
    with pytest.raises(StoreUnavailable, match="cannot be written: Is a directory"):
        await blobs.put(b"weights", owner="t1")
    assert files_below(root) == [path / "inside"]


async def test_objects_outlive_the_store_that_wrote_them(root: Path) -> None:
    data = os.urandom(900)
    digest = await DirectoryBlobs(root).put(data, owner="t1")
    assert await DirectoryBlobs(root).get(digest) == data


HOUR = Seconds(3600.0)


def grow_old(root: Path) -> None:
    for path in files_below(root):
        os.utime(path, (time.time() - 7200, time.time() - 7200))


def naming(*needed: str) -> Referenced:
    async def referenced(digests: Sequence[str]) -> Collection[str]:
        return [digest for digest in digests if digest in needed]

    return referenced


async def test_a_sweep_deletes_objects_that_no_row_names(blobs: DirectoryBlobs, root: Path) -> None:
    kept = await blobs.put(b"kept", owner="t1")
    await blobs.put(b"dropped", owner="t1")
    grow_old(root)
    assert await blobs.sweep(naming(kept), age_seconds=HOUR) == 1
    assert [path.name for path in files_below(root)] == [kept]
    assert await blobs.get(kept) == b"kept"


async def test_a_sweep_keeps_recent_objects(blobs: DirectoryBlobs, root: Path) -> None:
    await blobs.put(b"weights", owner="t1")
    grow_old(root)
    await blobs.put(b"weights", owner="t2")
    await blobs.put(b"new", owner="t2")
    assert await blobs.sweep(naming(), age_seconds=HOUR) == 0
    assert await blobs.get(DIGEST) == b"weights"


async def test_an_object_that_is_put_again_during_a_sweep_survives_it(
    blobs: DirectoryBlobs, root: Path
) -> None:
    await blobs.put(b"weights", owner="t1")
    grow_old(root)

    async def put_again(digests: Sequence[str]) -> Collection[str]:
        assert list(digests) == [DIGEST]
        await blobs.put(b"weights", owner="t2")
        return ()

    assert await blobs.sweep(put_again, age_seconds=HOUR) == 0
    assert await blobs.get(DIGEST) == b"weights"


async def test_a_sweep_removes_files_of_interrupted_writes(blobs: DirectoryBlobs, root: Path) -> None:
    await blobs.put(b"weights", owner="t1")
    (files_below(root)[0].parent / ".new-abc").touch()
    grow_old(root)
    await blobs.sweep(naming(DIGEST), age_seconds=HOUR)
    assert [path.name for path in files_below(root)] == [DIGEST]


async def test_a_sweep_skips_files_that_it_cannot_delete(blobs: DirectoryBlobs, root: Path) -> None:
    stuck = root / DIGEST[:2] / DIGEST[2:4] / DIGEST
    stuck.mkdir(parents=True)
    (stuck / "inside").touch()
    await blobs.put(b"dropped", owner="t1")
    grow_old(root)
    os.utime(stuck, (0, 0))
    assert await blobs.sweep(naming(), age_seconds=HOUR) == 1
    assert [path.name for path in files_below(root)] == ["inside"]


async def test_a_full_disk_is_reported_and_leaves_no_file(blobs: DirectoryBlobs, root: Path) -> None:
    with file_size_limit(100), pytest.raises(StoreUnavailable, match="cannot be written: File too large"):
        await blobs.put(b"x" * 1000, owner="t1")
    assert files_below(root) == []
    await blobs.put(b"x" * 1000, owner="t1")


async def test_a_sweep_of_nothing_deletes_nothing(blobs: DirectoryBlobs) -> None:
    assert await blobs.sweep(naming(), age_seconds=HOUR) == 0


async def test_a_store_names_the_blobs_of_arguments_results_and_kept_checkpoints(store: TaskStore) -> None:
    first, second = a_task("t1"), a_task("t2")
    term = await with_gpu(store, second)
    await store.submit(a_submission(first, arguments_digest="arguments"))
    await store.commit(term, [admission(first), admission(second)])
    await store.commit(term, [a_checkpoint(claimed(first), sequence) for sequence in range(1, 6)])
    await store.commit(term, [end(claimed(second), None, result_digest="result")])
    asked = ["arguments", "result", *(f"digest-{n}" for n in range(1, 6)), "nobody's"]
    assert await store.referenced(asked) == {"arguments", "result", "digest-3", "digest-4", "digest-5"}
    assert await store.referenced([]) == set()


async def test_nothing_is_swept_while_the_age_of_files_cannot_be_told(
    blobs: DirectoryBlobs, root: Path
) -> None:
    """After a jump of the clock, an object whose row is on its way would count as old."""
    await blobs.put(b"weights", owner="t1")
    grow_old(root)
    asked = asyncio.Semaphore(0)
    can_tell = False

    def may_prune() -> bool:
        asked.release()
        return can_tell

    keeping = asyncio.create_task(blobs.keep_clean(naming(), may_prune, every_seconds=Seconds(0.001)))
    for _ in range(3):
        await asyncio.wait_for(asked.acquire(), PATIENCE_SECONDS)
    assert await blobs.get(DIGEST) == b"weights"
    can_tell = True
    while files_below(root):
        await asyncio.wait_for(asked.acquire(), PATIENCE_SECONDS)
    keeping.cancel()


async def test_an_object_may_come_in_parts_and_be_read_in_parts(tmp_path: Path) -> None:
    blobs = DirectoryBlobs(tmp_path, max_bytes=10)
    assert await blobs.append("up-1", 0, b"0123") == 4
    assert await blobs.append("up-1", 0, b"0123") == 4, "it was there already"
    assert await DirectoryBlobs(tmp_path, max_bytes=10).append("up-1", 4, b"456789") == 10
    with pytest.raises(BlobTooLarge):
        await blobs.append("up-1", 10, b"x")
    digest = hashlib.sha256(b"0123456789").hexdigest()
    await blobs.finish("up-1", digest)
    assert await blobs.get(digest) == b"0123456789"
    assert await blobs.read(digest, 3, 4) == b"3456"
    assert await blobs.read(digest, 10, 4) == b""
    await blobs.append("up-1", 0, b"other")
    await blobs.append("up-1", 0, b"others")
    with pytest.raises(BlobCorrupt):
        await blobs.finish("up-1", digest)
    with pytest.raises(ValueError, match="cannot name a file"):
        await blobs.append("../up-1", 0, b"x")
    await blobs.append("up-2", 0, b"weights")
    await blobs.finish("up-2", DIGEST, was_computed=True)
    assert await blobs.get(DIGEST) == b"weights"
    for missing in (blobs.finish("up-1", digest), blobs.read("ab" * 32, 0, 1)):
        with pytest.raises(BlobMissing):
            await missing


async def test_upload_that_begins_anew_leaves_the_object_that_a_crash_made_of_it(tmp_path: Path) -> None:
    blobs = DirectoryBlobs(tmp_path)
    await blobs.append("up-1", 0, b"weights")
    [upload] = files_below(tmp_path)
    (folder := tmp_path / DIGEST[:2] / DIGEST[2:4]).mkdir(parents=True)
    os.link(upload, folder / DIGEST)  # and then it crashed
    assert await blobs.append("up-1", 0, b"wei") == 3
    assert await blobs.get(DIGEST) == b"weights"
    await blobs.append("up-1", 3, b"ghts")
    await blobs.finish("up-1", DIGEST)
    assert files_below(tmp_path) == [folder / DIGEST]


async def test_an_upload_that_is_discarded_leaves_no_file(tmp_path: Path) -> None:
    blobs = DirectoryBlobs(tmp_path)
    await blobs.append("up-1", 0, b"0123")
    await blobs.discard("up-1")
    await blobs.discard("up-1")
    assert files_below(tmp_path) == []


async def test_parts_that_nobody_goes_on_with_are_swept(tmp_path: Path) -> None:
    blobs = DirectoryBlobs(tmp_path)
    await blobs.append("up-1", 0, b"0123")
    [left] = files_below(tmp_path)
    os.utime(left, (0, 0))

    async def none(_digests: Sequence[str]) -> Collection[str]:
        return ()

    await blobs.sweep(none, age_seconds=Seconds(3600.0))
    assert not left.exists()
