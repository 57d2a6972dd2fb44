"""Cards say which processes are killed, so nobody else may write them; logs are bounded."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from gpubroker.runtime.messages import RunKey
from gpubroker_server.adapters.ray.agent import run_records
from gpubroker_server.adapters.ray.agent.run_records import Card, RunFiles, UnreadableCard

CARD = Card("t", 1, 0, (("GPU-a", 100),), "runner", 42, 4711, "ray-node")
BOOT = "this-boot"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "n1"


def opened(home: Path) -> RunFiles:
    return RunFiles(home, BOOT)


def test_a_card_is_read_as_it_was_written_until_it_is_removed(home: Path) -> None:
    opened(home).write_card(CARD)
    assert opened(home).cards() == [CARD]
    opened(home).remove_card(CARD.key)
    assert opened(home).cards() == []


def test_cards_of_another_boot_are_not_read_and_go(home: Path) -> None:
    RunFiles(home, "another-boot").write_card(CARD)
    (home / "x-1-0.new").write_text("half")
    opened(home).write_card(replace(CARD, task="u"))
    opened(home).remove_outdated()
    assert [path.name for path in home.iterdir()] == [f"u-1-0@{BOOT}.json"]


@pytest.mark.parametrize("text", ["", "{}", "[]", "{", '{"leases": 3}', '{"leases": [], "task": "t"}'])
def test_a_card_that_cannot_be_read_is_never_passed_over(home: Path, text: str) -> None:
    opened(home).write_card(CARD)
    (home / f"x-1-0@{BOOT}.json").write_text(text)
    with pytest.raises(UnreadableCard, match=r"x-1-0.*remove the file"):
        opened(home).cards()


def test_a_card_under_another_runs_name_is_no_card(home: Path) -> None:
    opened(home).write_card(CARD)
    (home / f"t-1-0@{BOOT}.json").rename(home / f"u-1-0@{BOOT}.json")
    with pytest.raises(UnreadableCard, match="card of t:1"):
        opened(home).cards()


def test_a_card_that_leads_elsewhere_is_no_card(home: Path, tmp_path: Path) -> None:
    opened(home).write_card(CARD)
    (home / f"t-1-0@{BOOT}.json").rename(tmp_path / "elsewhere")
    (home / f"t-1-0@{BOOT}.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnreadableCard):
        opened(home).cards()


def test_a_card_of_another_user_is_no_card(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(home).write_card(CARD)
    files = opened(home)
    somebody_else = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody_else)
    with pytest.raises(UnreadableCard, match="somebody else"):
        files.cards()


def test_what_is_made_on_the_way_is_for_this_user_only(home: Path) -> None:
    opened(home)
    assert [path.stat().st_mode & 0o777 for path in (home, home.parent)] == [0o700, 0o700]


def test_a_directory_of_another_user_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(home)
    somebody_else = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody_else)
    with pytest.raises(PermissionError, match="other users"):
        opened(home)


@pytest.mark.parametrize("part", ["", "a", "a/b"])
def test_below_a_directory_for_everybody_no_part_of_the_path_may_be_open_to_others(
    tmp_path: Path, part: str
) -> None:
    everybodys = tmp_path / "tmp"
    home = everybodys / "a" / "b" / "n1"
    home.mkdir(parents=True)
    everybodys.chmod(0o1777)
    opened(home)
    (everybodys / part if part else home).chmod(0o777)
    with pytest.raises(PermissionError, match="other users"):
        opened(home)


def test_below_a_directory_for_everybody_no_part_of_the_path_may_lead_elsewhere(tmp_path: Path) -> None:
    everybodys = tmp_path / "tmp"
    everybodys.mkdir()
    everybodys.chmod(0o1777)
    (tmp_path / "elsewhere").mkdir()
    (everybodys / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="other users"):
        opened(everybodys / "a" / "n1")


def test_a_link_into_a_directory_for_everybody_is_followed_to_the_check(tmp_path: Path) -> None:
    everybodys = tmp_path / "tmp"
    (everybodys / "a").mkdir(parents=True)
    (everybodys / "a").chmod(0o777)
    everybodys.chmod(0o1777)
    (tmp_path / "link").symlink_to(everybodys / "a")
    with pytest.raises(PermissionError, match="other users"):
        opened(tmp_path / "link" / "n1")


def test_a_disk_that_takes_no_more_leaves_no_half_card(home: Path) -> None:
    files = opened(home)
    (home / f"t-1-0@{BOOT}.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        files.write_card(CARD)
    assert [path.name for path in home.iterdir()] == [f"t-1-0@{BOOT}.json"]


def test_a_log_that_grew_too_long_goes_on_behind_its_last_lines(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_records, "LOG_BYTES", 1000)
    files = opened(home)
    path = files.log_of(CARD.key)
    with path.open("ab", buffering=0) as log:
        log.write(b"x" * 100_000 + b"the newest\n")
        files.tidy()
        log.write(b"and more\n")
    assert path.read_bytes().endswith(b"the newest\nand more\n")
    assert path.stat().st_size < 20_000


@pytest.mark.parametrize(("logs", "kept_bytes", "left"), [(2, 10**9, 2), (1000, 150, 1)])
def test_of_the_logs_of_runs_that_have_gone_the_newest_stay(
    home: Path, monkeypatch: pytest.MonkeyPatch, logs: int, kept_bytes: int, left: int
) -> None:
    monkeypatch.setattr(run_records, "KEPT_LOGS", logs)
    monkeypatch.setattr(run_records, "KEPT_LOG_BYTES", kept_bytes)
    files = opened(home)
    for number in range(5):
        path = files.log_of(RunKey(f"t{number}", 1, 0))
        path.write_bytes(b"x" * 100)
        os.utime(path, (number, number))
    files.write_card(replace(CARD, task="t0"))
    files.tidy()
    assert sorted(path.stem for path in home.glob("*.log")) == sorted(
        ["t0-1-0", *(f"t{number}-1-0" for number in range(5 - left, 5))]
    )
