"""Acknowledged tasks survive a power cut on SQLite, on simulated disk images."""

from random import Random
from typing import Any

from tests.chaos.disk import Answered, Sync, Truncate, Write, crashes
from tests.chaos.power_loss import cut_power


def test_everything_answered_is_there_after_a_power_cut() -> None:
    found = cut_power(1, 100, "FULL")
    assert (found.images, found.wrong, found.lost, found.stale) == (100, [], 0, 0)
    assert found.different > 60


def test_with_fewer_syncs_tasks_are_lost_but_no_transaction_is_partial() -> None:
    """This shows that the test above can fail."""
    found = cut_power(1, 20, "NORMAL")
    assert found.wrong == []
    assert found.lost > 0
    assert found.stale > 0


def test_synced_data_is_kept_and_unsynced_may_be_lost_torn_or_reordered() -> None:
    steps: list[Any] = [
        Write("db", 0, b"a" * 512),
        Sync("db"),
        Answered(1),
        Write("db", 0, b"b" * 512),
        Write("db", 512, b"c" * 1024),
        Write("log", 0, b"d" * 512),
        Answered(2),
        Truncate("db", 512),
    ]
    images = [next(crashes(steps, {"db": b"0"}, [7], Random(seed))) for seed in range(200)]
    assert {answered for answered, _ in images} == {2}
    found = {image["db"] for _, image in images}
    none, all_ = b"a" * 512, b"b" * 512 + b"c" * 1024
    assert {none, all_, b"a" * 512 + b"c" * 1024, b"b" * 512 + b"c" * 512} <= found
    assert {"log" in image for _, image in images} == {True, False}
    assert next(crashes(steps, {}, [3], Random(0))) == (1, {"db": none})
