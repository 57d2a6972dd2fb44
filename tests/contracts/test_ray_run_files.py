"""Records say which processes are killed, so no other user may write them. Logs are bounded."""

import os
from pathlib import Path

import pytest
from gpubroker.runtime.messages import RunKey
from gpubroker.runtime.output import Stream
from gpubroker_server.adapters.ray.agent import run_files
from gpubroker_server.adapters.ray.agent.run_files import RunFiles, RunLogs, RunRecord, UnreadableRecord
from msgspec.structs import replace

RECORD = RunRecord("t", 1, 0, (("GPU-a", 100),), "runner", 42, 4711, "ray-node", 5)
BOOT = "this-boot"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "n1"


def opened(home: Path) -> RunFiles:
    return RunFiles(home, BOOT)


def test_a_record_is_read_as_it_was_written_until_it_is_removed(home: Path) -> None:
    opened(home).write_record(RECORD)
    assert opened(home).records() == [RECORD]
    opened(home).remove_record(RECORD.key)
    assert opened(home).records() == []


def test_records_of_another_boot_are_not_read_and_are_removed(home: Path) -> None:
    RunFiles(home, "another-boot").write_record(RECORD)
    (home / "x-1-0.new").write_text("half")
    opened(home).write_record(replace(RECORD, task="u"))
    opened(home).remove_outdated()
    assert [path.name for path in home.iterdir()] == [f"u-1-0@{BOOT}.json"]


@pytest.mark.parametrize("text", ["", "{}", "[]", "{", '{"leases": 3}', '{"leases": [], "task": "t"}'])
def test_a_record_that_cannot_be_read_is_an_error(home: Path, text: str) -> None:
    opened(home).write_record(RECORD)
    (home / f"x-1-0@{BOOT}.json").write_text(text)
    with pytest.raises(UnreadableRecord, match=r"x-1-0.*remove the file"):
        opened(home).records()


def test_a_record_under_the_name_of_another_run_is_refused(home: Path) -> None:
    opened(home).write_record(RECORD)
    (home / f"t-1-0@{BOOT}.json").rename(home / f"u-1-0@{BOOT}.json")
    with pytest.raises(UnreadableRecord, match="record of t:1"):
        opened(home).records()


def test_a_record_that_is_a_link_is_refused(home: Path, tmp_path: Path) -> None:
    opened(home).write_record(RECORD)
    (home / f"t-1-0@{BOOT}.json").rename(tmp_path / "elsewhere")
    (home / f"t-1-0@{BOOT}.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnreadableRecord):
        opened(home).records()


def test_a_record_of_another_user_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(home).write_record(RECORD)
    files = opened(home)
    another_user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another_user)
    with pytest.raises(UnreadableRecord, match="another user"):
        files.records()


def test_new_directories_are_for_this_user_only(home: Path) -> None:
    opened(home)
    assert [path.stat().st_mode & 0o777 for path in (home, home.parent)] == [0o700, 0o700]


def test_a_directory_of_another_user_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(home)
    another_user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another_user)
    with pytest.raises(PermissionError, match="other users"):
        opened(home)


@pytest.mark.parametrize("part", ["", "a", "a/b"])
def test_no_part_of_a_path_below_a_shared_directory_is_writable_for_others(tmp_path: Path, part: str) -> None:
    shared = tmp_path / "tmp"
    home = shared / "a" / "b" / "n1"
    home.mkdir(parents=True)
    shared.chmod(0o1777)
    opened(home)
    (shared / part if part else home).chmod(0o777)
    with pytest.raises(PermissionError, match="other users"):
        opened(home)


def test_below_a_shared_directory_no_part_of_the_path_may_be_a_link(tmp_path: Path) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    (tmp_path / "elsewhere").mkdir()
    (shared / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="other users"):
        opened(shared / "a" / "n1")


def test_the_check_follows_a_link_into_a_shared_directory(tmp_path: Path) -> None:
    shared = tmp_path / "tmp"
    (shared / "a").mkdir(parents=True)
    (shared / "a").chmod(0o777)
    shared.chmod(0o1777)
    (tmp_path / "link").symlink_to(shared / "a")
    with pytest.raises(PermissionError, match="other users"):
        opened(tmp_path / "link" / "n1")


def test_a_record_that_cannot_be_written_leaves_no_draft(home: Path) -> None:
    files = opened(home)
    (home / f"t-1-0@{BOOT}.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        files.write_record(RECORD)
    assert [path.name for path in home.iterdir()] == [f"t-1-0@{BOOT}.json"]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_log_grown_too_long_loses_its_middle_and_bytes_keep_their_place(
    home: Path, monkeypatch: pytest.MonkeyPatch, stream: Stream
) -> None:
    monkeypatch.setattr(run_files, "LOG_BYTES", 100_000)
    monkeypatch.setattr(run_files, "KEPT_END_BYTES", 8192)
    files = opened(home)
    path = files.log_of(RECORD.key, stream)
    printed = b"the first\n" + b"x" * 300_000 + b"the newest\n"
    with path.open("ab", buffering=0) as log:
        log.write(printed)
        files.limit_logs()
        log.write(b"and more\n")
    left = path.read_bytes()
    assert len(left) == len(printed) + 9
    assert left[:8192] == printed[:8192]
    assert left[-8192:] == (printed + b"and more\n")[-8192:]
    assert path.stat().st_blocks * 512 < 100_000

    logs = RunLogs(files, limit_bytes=2000)
    first, last = [report[6:8] for report in logs.kept(RECORD.key)]
    assert first == (0, printed[:1000])
    assert last == (len(left) - 1000, left[-1000:])
    _, *_, first_byte, data, _ = logs.new(RECORD.key, stream, 50_000)
    assert (first_byte, data) == last, "what a reader has missed is not told any more"
    assert logs.new(RECORD.key, stream, 900)[6:8] == (900, printed[900:1000])
    assert logs.new(RECORD.key, stream, len(left))[6:] == (len(left), b"", False)


def test_what_a_run_in_a_shared_process_prints_is_added_to_its_own_files(home: Path) -> None:
    files = opened(home)
    files.add_to_log(RECORD.key, b"out\n", b"")
    files.add_to_log(RECORD.key, b"", b"err\n")
    assert files.log_of(RECORD.key).read_bytes() == b"out\n"
    errors = files.log_of(RECORD.key, "stderr")
    assert errors.read_bytes() == b"err\n"
    assert files.key_of_log(str(errors)) == RECORD.key
    assert errors.stat().st_mode & 0o777 == 0o600
    told = list(RunLogs(files, 2000).kept(RECORD.key))
    assert [(report[0], *report[5:]) for report in told] == [
        ("logged", "stdout", 0, b"out\n", True),
        ("logged", "stderr", 0, b"err\n", True),
    ]
    assert list(RunLogs(files, 2000).kept(RunKey("other", 1, 0))) == []


@pytest.mark.parametrize(("logs", "kept_bytes", "left"), [(2, 10**9, 2), (1000, 150, 1)])
def test_of_runs_that_are_gone_the_newest_logs_are_kept(
    home: Path, monkeypatch: pytest.MonkeyPatch, logs: int, kept_bytes: int, left: int
) -> None:
    monkeypatch.setattr(run_files, "KEPT_LOGS", logs)
    monkeypatch.setattr(run_files, "KEPT_LOG_BYTES", kept_bytes)
    files = opened(home)
    for number in range(5):
        path = files.log_of(RunKey(f"t{number}", 1, 0))
        path.write_bytes(b"x" * 100)
        os.utime(path, (number, number))
    files.write_record(replace(RECORD, task="t0"))
    files.limit_logs()
    assert sorted(path.stem for path in home.glob("*.log")) == sorted(
        ["t0-1-0", *(f"t{number}-1-0" for number in range(5 - left, 5))]
    )
