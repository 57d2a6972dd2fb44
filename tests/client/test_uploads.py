"""What is sent of a directory, and in which form."""

import hashlib
import os
import subprocess
from io import BytesIO
from pathlib import Path

import pytest
from gpubroker import WrongArgument
from gpubroker.runtime.archives import ArchiveLimits, unpack
from gpubroker.uploads.archive import archive_of
from gpubroker.uploads.ignoring import entries_of

LIMITS = ArchiveLimits(10_000, 100)


def write(folder: Path, **files: str) -> Path:
    """Write files, by their paths with __ for slashes."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def names(folder: Path) -> list[str]:
    return [entry.name for entry in entries_of(folder)]


def packed(folder: Path, limits: ArchiveLimits = LIMITS) -> tuple[str, bytes]:
    archive = archive_of(folder, limits)
    data = b"".join(archive.parts())
    assert len(data) == archive.size_bytes
    return archive.id, data


def test_equal_directories_have_one_id_whatever_their_times_and_owners(tmp_path: Path) -> None:
    one = write(tmp_path / "one", a="1", b__c="2")
    other = write(tmp_path / "other", b__c="2", a="1")
    os.utime(other / "a", (1, 1))
    assert packed(one) == packed(other)
    (other / "a").chmod(0o755)
    assert packed(one)[0] != packed(other)[0], "the mode is part of it"


def test_archive_sends_the_bytes_that_its_id_names(tmp_path: Path) -> None:
    folder = write(tmp_path, a="1" * 3000, b="2")
    archive = archive_of(folder, LIMITS)
    assert archive.id
    (folder / "a").write_text("3" * 3000)
    assert hashlib.sha256(b"".join(archive.parts())).hexdigest() == archive.id
    assert packed(folder)[0] != archive.id


def test_archive_comes_out_as_it_went_in(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", a="1", deep__er__b="2")
    (folder / "empty").mkdir()
    (folder / "a").chmod(0o751)
    (folder / "deep" / "link").symlink_to("../a")
    (folder / "long" / ("n" * 120)).mkdir(parents=True)
    (folder / "d\udcffx").write_text("no UTF-8")
    target = tmp_path / "out"
    target.mkdir()
    unpack(BytesIO(packed(folder)[1]), target, LIMITS)
    assert names(target) == names(folder)
    assert (target / "a").stat().st_mode & 0o777 == 0o751
    assert (target / "deep" / "link").readlink() == Path("../a")
    assert list((target / "empty").iterdir()) == []


def test_ignore_files_are_read_as_git_reads_them(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "repository",
        **{".gitignore": "*.log\n/build/\n!keep.log\nnested/deep/*.txt\n", "noise.log": "", "keep.log": ""},
        build__x="", src__build__y="", nested__deep__a="",
    )  # fmt: skip
    write(
        folder,
        **{"nested__.gitignore": "!deep/b.txt\n", "nested__deep__b.txt": "", "nested__deep__c.txt": ""},
    )
    write(folder, **{"src__ignored here": "", "src__.gitignore": "ignored*\n", "spaced name": ""})
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    listed = subprocess.run(
        ["git", "-C", str(folder), "ls-files", "--others", "--exclude-standard"],
        check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    files = [name for name in names(folder) if (folder / name).is_file()]
    assert sorted(files) == sorted(line.strip('"') for line in listed)


def test_ignore_files_above_count_in_a_git_work_tree(tmp_path: Path) -> None:
    write(
        tmp_path, **{".gitignore": "*.tmp\nsub/secret\n", "sub__a": "", "sub__b.tmp": "", "sub__secret": ""}
    )
    assert names(tmp_path / "sub") == ["a", "b.tmp", "secret"], "it is in no work tree"
    (tmp_path / ".git").mkdir()
    assert names(tmp_path / "sub") == ["a"]


def test_git_and_bytecode_are_never_sent(tmp_path: Path) -> None:
    write(tmp_path, **{"a": "", ".git__config": "", "x__.git": "gitdir: .."})
    write(tmp_path / "x" / "__pycache__", m="")
    write(tmp_path, **{".gpubrokerignore": "!.git\n"})
    assert names(tmp_path) == [".gpubrokerignore", "a", "x"]


def test_directory_that_is_too_large_names_its_largest_files(tmp_path: Path) -> None:
    write(tmp_path, small="x")
    for number in range(12):
        write(tmp_path, **{f"data__{number:02}": "x" * 1000 * (number + 1)})
    with pytest.raises(WrongArgument, match="an upload may have") as refused:
        packed(tmp_path)
    lines = str(refused.value).splitlines()[1:]
    assert [line.split()[-1] for line in lines] == [f"data/{number:02}" for number in range(11, 1, -1)]
    assert ".gpubrokerignore" in str(refused.value)


def test_directory_with_too_many_files_names_where_they_are(tmp_path: Path) -> None:
    for number in range(101):
        write(tmp_path, **{f"many__{number}": ""})
    with pytest.raises(
        WrongArgument, match="102 files and directories, and an upload may have 100"
    ) as refused:
        packed(tmp_path)
    assert "101 in many" in str(refused.value)


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "sub/../../outside", "sub/../a"])
def test_link_that_may_lead_out_is_refused_with_its_path(tmp_path: Path, target: str) -> None:
    folder = write(tmp_path / "in", a="", sub__b="")
    (folder / "link").symlink_to(target)
    with pytest.raises(WrongArgument, match=f"{folder}/link leads to {target}.*gpubrokerignore"):
        packed(folder)
    write(folder, **{".gpubrokerignore": "link\n"})
    packed(folder)


def test_what_is_no_file_is_refused_with_its_path(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WrongArgument, match=f"{tmp_path}/pipe is no file"):
        packed(tmp_path)
    with pytest.raises(WrongArgument, match="nowhere does not exist"):
        packed(tmp_path / "nowhere")
