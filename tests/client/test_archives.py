"""Archives that anybody may have made are unpacked, or refused before anything is written outside."""

import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from gpubroker.runtime.archives import ArchiveLimits, BadArchive, stays_inside, unpack
from gpubroker.runtime.collecting import collect, pattern_of

LIMITS = ArchiveLimits(1000, 10)


def tar_of(*members: dict[str, Any]) -> BytesIO:
    file = BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for given in members:
            fields = dict(given)
            data = fields.pop("data", b"")
            member = tarfile.TarInfo(fields.pop("name"))
            member.size = len(data)
            for field, value in fields.items():
                setattr(member, field, value)
            archive.addfile(member, BytesIO(data))
    file.seek(0)
    return file


HOSTILE = {
    "leads out": tar_of({"name": "../x"}),
    "leads out of": tar_of({"name": "a/../../x"}),
    "out of the directory; name": tar_of({"name": "/etc/x"}),
    "leads to '/etc'": tar_of({"name": "l", "type": tarfile.SYMTYPE, "linkname": "/etc"}),
    "leads to '..'": tar_of({"name": "l", "type": tarfile.SYMTYPE, "linkname": ".."}),
    "leads to 'd/../..'": tar_of({"name": "l", "type": tarfile.SYMTYPE, "linkname": "d/../.."}),
    "something else": tar_of(
        {"name": "l", "type": tarfile.SYMTYPE, "linkname": "d"}, {"name": "l/x", "data": b"x"}
    ),
    "no file, directory or symbolic link": tar_of({"name": "h", "type": tarfile.LNKTYPE, "linkname": "x"}),
    "no file, directory": tar_of({"name": "p", "type": tarfile.FIFOTYPE}),
    "no file": tar_of({"name": "b", "type": tarfile.BLKTYPE}),
    "there already": tar_of({"name": "x"}, {"name": "x"}),
    "more than 1000 bytes": tar_of({"name": "x", "data": b"x" * 600}, {"name": "y", "data": b"x" * 600}),
    "more than 10 files": tar_of(*({"name": str(number)} for number in range(11))),
    "cannot be read": BytesIO(b"no archive" * 100),
    "the archive cannot be read": BytesIO(b""),
    "damaged at byte 512": BytesIO(tar_of({"name": "a"}).getvalue()[:512] + b"?" * 512),
}


@pytest.mark.parametrize("said", HOSTILE)
def test_hostile_archive_is_refused_and_writes_nothing_outside(said: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(BadArchive, match=said):
        unpack(HOSTILE[said], target, LIMITS)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_sparse_member_is_refused_whatever_size_it_claims(tmp_path: Path) -> None:
    member = tarfile.TarInfo("s")
    member.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.realsize": "999999999",
    }
    data = b"1\n0\n1\n".ljust(512, b"\0") + b"x"
    member.size = len(data)
    file = BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(member, BytesIO(data))
    file.seek(0)
    with pytest.raises(BadArchive, match="sparse"):
        unpack(file, tmp_path, LIMITS)


def test_archive_of_other_programs_is_unpacked(tmp_path: Path) -> None:
    archive = tar_of({"name": "./", "type": tarfile.DIRTYPE}, {"name": "./a/b", "data": b"1", "mode": 0o4755})
    assert unpack(archive, tmp_path, LIMITS) == 1
    assert (tmp_path / "a" / "b").stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize(
    ("name", "target", "inside"),
    [
        ("l", "a", True), ("d/l", "../a", True), ("d/l", "../../a", False), ("l", "", False),
        ("l", "/a", False), ("d/e/l", "../../f/g", True), ("d/l", "x/../y", False),
    ],
)  # fmt: skip
def test_link_stays_inside_whatever_other_links_there_are(name: str, target: str, inside: bool) -> None:
    assert stays_inside(name, target) is inside


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        ("runs/**", ["runs/a", "runs/a/b"], ["runs", "other/runs/a"]),
        ("runs", ["runs", "runs/a/b"], ["runs2"]),
        ("*.pt", ["m.pt", "m.pt/x"], ["a/m.pt", "m.ptx"]),
        ("**/*.log", ["a.log", "x/y/a.log"], ["a.txt"]),
        ("a?c", ["abc"], ["ac", "a/c"]),
    ],
)
def test_patterns_match_paths_below_the_directory(
    pattern: str, matches: list[str], others: list[str]
) -> None:
    found = pattern_of([pattern])
    assert [path for path in (*matches, *others) if found.fullmatch(path)] == matches


def test_collecting_follows_no_link_and_keeps_to_its_limits(tmp_path: Path) -> None:
    folder, secret = tmp_path / "run", tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("secret")
    (folder / "d").mkdir(parents=True)
    (folder / "link").symlink_to(secret)
    (folder / "file link").symlink_to(secret / "key")
    for name, size in (("a", 400), ("b", 700), ("c", 500)):
        (folder / "d" / name).write_bytes(b"x" * size)
    archive = BytesIO()
    collected = collect(str(folder), ["**"], LIMITS, archive)
    assert collected.files == 2, "b is beyond the limit"
    assert collected.message.startswith("left out: 1 beyond the limits of 1000 bytes and 10 files")
    assert collected.message.endswith("2 that are links")
    archive.seek(0)
    target = tmp_path / "target"
    target.mkdir()
    unpack(archive, target, LIMITS)
    assert sorted(path.name for path in target.rglob("*")) == ["a", "c", "d"]
