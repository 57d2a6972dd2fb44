"""Which files go first when a disk fills up, and which never do."""

from dataclasses import replace
from typing import Any

import pytest
from gpubroker_server.core.control.disk_guard import (
    CLASSES,
    DiskLevel,
    DiskRules,
    FileClass,
    FileSeen,
    KeptBecause,
    choose,
    level_of,
    needed_bytes,
)
from gpubroker_server.core.domain.units import Instant
from hypothesis import given
from hypothesis import strategies as st

RULES = DiskRules()
DAY = 86_400.0
NOW = Instant(100 * DAY)
ALL = 10**18


def a_file(path: str, file_class: FileClass = FileClass.LOG, *, days: float = 8.0, **about: Any) -> FileSeen:
    modified_at = Instant(NOW - days * DAY)
    return FileSeen("/scratch", path, file_class, 100, modified_at)._replace(**about)


def why_kept(*files: FileSeen, live: tuple[str, ...] = ()) -> dict[KeptBecause, int]:
    return dict(choose(files, live, ALL, NOW, RULES).kept)


@pytest.mark.parametrize(
    ("share", "level"),
    [(None, 0), (0.0, 0), (0.599, 0), (0.6, 1), (0.649, 1), (0.65, 2), (0.699, 2), (0.7, 3), (1.0, 3)],
)
def test_the_levels(share: float | None, level: int) -> None:
    assert level_of(share, RULES) == DiskLevel(level)


def test_classes_go_in_their_order_and_the_oldest_first() -> None:
    files = [
        a_file("copy", FileClass.REDUNDANT, days=99, is_synced=True),
        a_file("step-1", FileClass.CHECKPOINT, days=50),
        a_file("step-2", FileClass.CHECKPOINT, days=40),
        a_file("runs.db", FileClass.EMPTY_DATABASE, days=30, is_empty=True),
        a_file("new.log", days=8),
        a_file("old.log", days=9),
    ]
    cleaning = choose(files, (), ALL, NOW, RULES)
    assert [one.path for one in cleaning.files] == ["old.log", "new.log", "runs.db", "step-1", "copy"]
    assert cleaning.kept == {KeptBecause.NEWEST_CHECKPOINT: 1}
    assert cleaning.freed_bytes == 500


def test_no_more_goes_than_is_needed() -> None:
    files = [a_file("a", days=10), a_file("b", days=9), a_file("c", days=8)]
    cleaning = choose(files, (), 101, NOW, RULES)
    assert [one.path for one in cleaning.files] == ["a", "b"]
    assert cleaning.kept == {KeptBecause.NOT_NEEDED: 1}
    assert choose(files, (), 0, NOW, RULES).files == ()


def test_what_is_needed_brings_the_disk_down_to_the_first_threshold() -> None:
    assert needed_bytes(1000, 300, RULES) == 100
    assert needed_bytes(1000, 500, RULES) == 0


def test_what_stays() -> None:
    assert why_kept(a_file("a", is_open=True)) == {KeptBecause.OPEN: 1}
    assert why_kept(a_file("a", days=6.9)) == {KeptBecause.YOUNG: 1}
    assert why_kept(a_file("a", FileClass.EMPTY_DATABASE, has_journal=True, is_empty=True)) == {
        KeptBecause.HAS_JOURNAL: 1
    }
    assert why_kept(a_file("a", FileClass.EMPTY_DATABASE)) == {KeptBecause.HAS_ROWS: 1}
    assert why_kept(a_file("a", FileClass.REDUNDANT)) == {KeptBecause.NOT_SYNCED: 1}


def test_the_newest_checkpoint_of_a_directory_and_that_of_a_live_task_stay() -> None:
    files = [
        a_file(f"{run}/step-{step}", FileClass.CHECKPOINT, days=20 - step)
        for run in "xy"
        for step in (1, 2, 3)
    ]
    cleaning = choose(files, ["/scratch/x/step-1"], ALL, NOW, RULES)
    assert [one.path for one in cleaning.files] == ["y/step-1", "x/step-2", "y/step-2"]
    assert cleaning.kept == {KeptBecause.NEWEST_CHECKPOINT: 2, KeptBecause.OF_LIVE_TASK: 1}


FILES = st.lists(
    st.builds(
        FileSeen,
        root=st.just("/scratch"),
        path=st.from_regex(r"[ab]/[a-z]{1,3}", fullmatch=True),
        file_class=st.sampled_from(CLASSES),
        size_bytes=st.integers(0, 1000),
        modified_at=st.floats(0, NOW).map(Instant),
        is_open=st.booleans(),
        has_journal=st.booleans(),
        is_empty=st.booleans(),
        is_synced=st.booleans(),
    ),
    max_size=20,
    unique_by=lambda one: one.path,
)


@given(FILES, st.integers(0, 5000), st.lists(st.from_regex(r"/scratch/[ab]/[a-z]{1,3}", fullmatch=True)))
def test_whatever_there_is_nothing_goes_that_must_stay(
    files: list[FileSeen], needed: int, live: list[str]
) -> None:
    cleaning = choose(files, live, needed, NOW, RULES)
    for one in cleaning.files:
        assert not one.is_open
        assert NOW - one.modified_at >= RULES.old_seconds
        assert one.whole_path not in live or one.file_class is not FileClass.CHECKPOINT
        assert one.file_class is not FileClass.REDUNDANT or one.is_synced
        assert one.file_class is not FileClass.EMPTY_DATABASE or (one.is_empty and not one.has_journal)
    assert len(cleaning.files) + sum(cleaning.kept.values()) == len(files)
    order = [(CLASSES.index(one.file_class), one.modified_at) for one in cleaning.files]
    assert order == sorted(order)
    without_last = replace(cleaning, files=cleaning.files[:-1]) if cleaning.files else cleaning
    assert without_last.freed_bytes < needed or not cleaning.files
