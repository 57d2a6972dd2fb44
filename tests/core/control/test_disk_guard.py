"""Which files go first when a disk fills up, and which never do."""

from collections.abc import Iterable
from typing import Any

import pytest
from gpubroker_server.core.control.disk_guard import (
    CLASSES,
    WEEK_SECONDS,
    Cleaning,
    DiskGuard,
    DiskLevel,
    DiskRules,
    DiskStanding,
    FileSeen,
    KeptBecause,
    choose,
    follow_disks,
    level_of,
    needed_bytes,
    nodes_to_clean,
)
from gpubroker_server.core.domain.device import DiskSample, FileClass, FoundFile, NodeSample, WatchedRoot
from gpubroker_server.core.domain.units import Instant, Mib, NodeName
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.builders import a_node, a_world

RULES = DiskRules()
DAY = 86_400.0
NOW = Instant(100 * DAY)
ALL = 10**18


def a_file(path: str, file_class: FileClass = FileClass.LOG, *, days: float = 8.0, **about: Any) -> FileSeen:
    modified_at = Instant(NOW - days * DAY)
    return FileSeen("/scratch", path, file_class, 100, modified_at)._replace(**about)


def a_sample_of(node: str, used_percent: float, at: float = NOW) -> NodeSample:
    disks = (DiskSample("/a", 1000, round(1000 - 10 * used_percent)),)
    return NodeSample(NodeName(node), Instant(at), 0.0, Mib(10), Mib(5), disks=disks)


def chosen(
    files: Iterable[FileSeen], live: Iterable[str] = (), needed: int = ALL, left: str = ""
) -> Cleaning:
    """`left`: the path of a file that is open when it is looked at."""
    return choose(files, live, needed, NOW, WEEK_SECONDS, lambda one: "open" if one.path == left else "")


def why_kept(*files: FileSeen) -> dict[str, int]:
    return dict(chosen(files).kept)


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
    cleaning = chosen(files)
    assert [one.path for one in cleaning.files] == ["old.log", "new.log", "runs.db", "step-1", "copy"]
    assert cleaning.kept == {KeptBecause.NEWEST_CHECKPOINT: 1}
    assert cleaning.freed_bytes == 500


def test_no_more_goes_than_is_needed() -> None:
    files = [a_file("a", days=10), a_file("b", days=9), a_file("c", days=8)]
    cleaning = chosen(files, needed=101)
    assert [one.path for one in cleaning.files] == ["a", "b"]
    assert cleaning.kept == {KeptBecause.NOT_NEEDED: 1}
    assert chosen(files, needed=0).files == ()


def test_the_next_one_goes_in_place_of_a_file_that_is_open() -> None:
    files = [a_file("a", days=10), a_file("b", days=9), a_file("c", days=8)]
    cleaning = chosen(files, needed=100, left="a")
    assert [one.path for one in cleaning.files] == ["b"]
    assert cleaning.kept == {"open": 1, KeptBecause.NOT_NEEDED: 1}


def test_what_is_needed_brings_the_disk_down_to_the_first_threshold() -> None:
    assert needed_bytes(1000, 300, 0.6) == 100
    assert needed_bytes(1000, 500, 0.6) == 0


def test_what_stays() -> None:
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
    cleaning = chosen(files, ["/scratch/x/step-1"])
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
    cleaning = chosen(files, live, needed)
    for one in cleaning.files:
        assert NOW - one.modified_at >= WEEK_SECONDS
        assert one.whole_path not in live
        assert one.file_class is not FileClass.REDUNDANT or one.is_synced
        assert one.file_class is not FileClass.EMPTY_DATABASE or (one.is_empty and not one.has_journal)
    assert len(cleaning.files) + sum(cleaning.kept.values()) == len(files)
    order = [(CLASSES.index(one.file_class), one.modified_at) for one in cleaning.files]
    assert order == sorted(order)
    without_last = replace(cleaning, files=cleaning.files[:-1]) if cleaning.files else cleaning
    assert without_last.freed_bytes < needed or not cleaning.files


def test_the_newest_entry_of_a_directory_stays_with_all_that_is_in_it() -> None:
    """Whose it is may be known to its owner alone. Directories of jobs, directly below the root, are no
    entries."""
    parts = ("model", "rank-0/optimizer")
    files = [
        a_file(f"job/step-{step}/{part}", FileClass.CHECKPOINT, days=20 - step)
        for step in (1, 2)
        for part in parts
    ]
    files += [a_file("other/a/old/1", FileClass.CHECKPOINT, days=90), a_file("x", FileClass.CHECKPOINT)]
    gone = {one.path for one in chosen(files).files}
    assert gone == {"job/step-1/model"}  # of equally new ones the last by name stays
    live = ["/scratch/job/step-1"]
    assert {one.path for one in chosen(files, live).files} == set()


def test_all_files_of_the_newest_checkpoint_of_a_directory_stay() -> None:
    """Ranks write files of their own beside each other, one somewhat later than the other."""
    files = [
        a_file(f"{job}/step-{step}-rank-{rank}.pt", FileClass.CHECKPOINT, days=20 - step - rank / 2000)
        for job in ("job", "team/job")
        for step in (1, 2)
        for rank in range(4)
    ]
    newer = a_file("team/other/step-1.pt", FileClass.CHECKPOINT, days=9, size_bytes=900)
    gone = {one.path for one in chosen([*files, newer]).files}
    assert gone == {f"{job}/step-1-rank-{rank}.pt" for job in ("job", "team/job") for rank in range(4)}


def test_checkpoint_prefix_told_by_a_live_task_protects_its_files() -> None:
    paths = [f"job/step-{step}-rank-{rank}.pt" for step in (1, 2) for rank in range(2)]
    files = [a_file(path, FileClass.CHECKPOINT, days=20 - day) for day, path in enumerate(paths)]
    cleaning = chosen(files, ["/scratch/job/step-1"])
    assert [one.path for one in cleaning.files] == ["job/step-2-rank-0.pt"]
    assert cleaning.kept == {KeptBecause.OF_LIVE_TASK: 2, KeptBecause.NEWEST_CHECKPOINT: 1}


def test_a_mark_or_what_a_crash_left_is_no_newest_checkpoint() -> None:
    """Marks and indexes are written last, and are small. So is a checkpoint that was not written whole."""
    job = [("step-1", 100, 9), ("step-2", 90, 8), ("step-3", 40, 7.5), ("latest", 1, 7.2)]
    files = [
        a_file(f"job/{name}", FileClass.CHECKPOINT, days=days, size_bytes=size) for name, size, days in job
    ]
    cleaning = chosen(files)
    assert [one.path for one in cleaning.files] == ["job/step-1"]
    assert cleaning.kept == {KeptBecause.NEWEST_CHECKPOINT: 3}
    empty = [one._replace(size_bytes=0) for one in files]
    assert chosen(empty).kept == {KeptBecause.NEWEST_CHECKPOINT: 1}


def test_a_node_has_rules_of_its_own_before_those_of_its_labels() -> None:
    one, two = DiskRules(0.1), DiskRules(0.2)
    overrides = {"label:role=coordinator": one, "label:disk=small": two, "node:n1": two}
    guard = DiskGuard(warn=0.3, overrides=overrides)
    labels = (("disk", "small"), ("role", "coordinator"))
    assert guard.rules_of(replace(a_node("n1"), labels=labels)) == two
    assert guard.rules_of(replace(a_node("n2"), labels=labels)) == one
    assert guard.rules_of(replace(a_node("n3"), labels=labels[:1])) == two
    assert guard.rules_of(a_node("n4")) == guard


def test_a_disk_leaves_a_level_when_it_is_one_percent_below_it() -> None:
    guard, standings = DiskGuard(), dict[tuple[NodeName, str], DiskStanding]()
    levels = []
    for used in (59, 60, 59.5, 60, 58.9, 65, 66, 64.5, 63.9, 71, 50):
        sample = a_sample_of("n1", used)
        standings = {
            (one.node, one.path): one for one in follow_disks(standings, guard, [(a_node("n1"), sample)])
        }
        levels.append(int(standings[NodeName("n1"), "/a"].level))
    assert levels == [0, 1, 1, 1, 0, 2, 2, 2, 1, 3, 0]


def test_only_nodes_that_answer_with_a_full_disk_under_a_root_are_cleaned() -> None:
    root = WatchedRoot("/a", FileClass.LOG)
    world = a_world(
        a_node("n1"), replace(a_node("n2"), ready=False), a_node("n3"), a_node("n4"), a_node("n5")
    )
    for name, used, at in (("n1", 65, 0.0), ("n2", 90, 0.0), ("n3", 90, -60.0), ("n4", 64, 0.0)):
        world.node_samples[NodeName(name)] = a_sample_of(name, used, NOW + at)
    assert nodes_to_clean(world, DiskGuard(roots=(root,)), NOW) == ["n1"]
    assert nodes_to_clean(world, DiskGuard(), NOW) == []
    elsewhere = DiskGuard(roots=(replace(root, path="/b"),))
    assert nodes_to_clean(world, elsewhere, NOW) == []  # its disk is not full


def test_a_file_is_known_by_its_whole_path() -> None:
    assert FoundFile("/scratch", "a/b.log", FileClass.LOG, 1, 2, 3).whole_path == "/scratch/a/b.log"
