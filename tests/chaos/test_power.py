"""What a power cut leaves of a SQLite database, tried on disks as they may be found after one."""

from random import Random

from tests.chaos import power
from tests.chaos.disk import Sync, Told, Truncate, Write, crashes


def test_all_that_was_answered_is_there_after_a_power_cut() -> None:
    found = power.try_out(1, 100, "FULL")
    assert (found.images, found.wrong, found.lost, found.forgetful) == (100, [], 0, 0)
    assert found.different > 60


def test_with_fewer_syncs_some_would_be_lost_and_nothing_be_half() -> None:
    """Or the test above could not fail."""
    found = power.try_out(1, 20, "NORMAL")
    assert found.wrong == []
    assert found.lost > 0
    assert found.forgetful > 0


def test_what_was_synced_is_kept_and_what_was_not_may_be_kept_torn_or_without_what_came_before() -> None:
    steps = [
        Write("db", 0, b"a" * 512),
        Sync("db"),
        Told(1),
        Write("db", 0, b"b" * 512),
        Write("db", 512, b"c" * 1024),
        Write("log", 0, b"d" * 512),
        Told(2),
        Truncate("db", 512),
    ]
    images = [next(crashes(steps, {"db": b"0"}, [7], Random(seed))) for seed in range(200)]
    assert {answered for answered, _ in images} == {2}
    found = {image["db"] for _, image in images}
    none, all_ = b"a" * 512, b"b" * 512 + b"c" * 1024
    assert {none, all_, b"a" * 512 + b"c" * 1024, b"b" * 512 + b"c" * 512} <= found
    assert {"log" in image for _, image in images} == {True, False}
    assert next(crashes(steps, {}, [3], Random(0))) == (1, {"db": none})
