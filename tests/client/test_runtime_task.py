"""The handle that a task has on itself."""

import hashlib
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpubroker import Stopped, current_task
from gpubroker.runtime import CheckpointTooLarge, NoCurrentTask, RunningTask
from gpubroker.runtime.journal import START_OVER, Journal
from gpubroker.runtime.messages import Report, RunOrder, carriable, is_report
from gpubroker.runtime.process import RendezvousPort, announce_rendezvous
from gpubroker.runtime.task import Workers

ORDER = RunOrder(task="t", fence=2, kind="entrypoint", attempt=2, leases=(("GPU-a", 100), ("GPU-b", 100)))


class Recorded:
    """A running task, and its reports."""

    def __init__(self, **changes: Any) -> None:
        self.journal = Journal(lambda _delay: None)
        self.task = RunningTask(replace(ORDER, **changes), self.journal)

    def told(self) -> list[Report]:
        return [report for _, report in self.journal.take(START_OVER, 10**9)]


def test_current_task_outside_of_a_task_says_where_it_works() -> None:
    with pytest.raises(NoCurrentTask, match="inside a function that gpubroker started"):
        current_task()


def test_the_devices_are_the_uuids_in_the_order_of_their_numbers() -> None:
    assert Recorded().task.devices == ("GPU-a", "GPU-b")


@pytest.mark.parametrize("state", [b"raw \x00 bytes", {"step": 3, "xs": {1, 2}}, None, [b""], ""])
def test_a_saved_state_comes_back_as_it_was(state: Any) -> None:
    saving = Recorded()
    saving.task.checkpoint(state)
    [(_kind, _task, _fence, _rank, _at, _sequence, digest, data, uri)] = saving.told()
    assert digest == hashlib.sha256(data).hexdigest()
    assert uri is None
    assert Recorded(resume_state=data).task.resume_state == state


def test_a_state_that_cannot_be_pickled_says_which_part() -> None:
    with pytest.raises(TypeError) as refused:
        Recorded().task.checkpoint({"model": [threading.Lock()]})
    assert refused.value.__notes__[0].startswith("checkpoint(state): the state['model'][0] cannot be pickled")


def test_the_first_attempt_resumes_from_nothing() -> None:
    assert (Recorded().task.resume_state, Recorded().task.resume_uri) == (None, None)


@pytest.mark.parametrize("attempt", [1, 2_148, 59_979_714])
def test_a_checkpoint_of_any_attempt_can_be_reported(attempt: int) -> None:
    """A database that was restored counts attempts from millions."""
    saving = Recorded(fence=attempt, attempt=attempt)
    saving.task.checkpoint(b"")
    [report] = saving.told()
    assert carriable(report) == report


def test_a_state_over_the_limit_is_not_saved_at_all() -> None:
    saving = Recorded(checkpoint_limit_bytes=1000)
    with pytest.raises(CheckpointTooLarge, match="checkpoint\\(uri="):
        saving.task.checkpoint(b"x" * 1000)
    assert saving.told() == []


def test_only_the_newest_progress_is_reported_and_it_is_between_0_and_1() -> None:
    working = Recorded()
    for fraction in (0.1, 0.5, 1.000001):
        working.task.progress(fraction, "x" * 1000)
    [(*_, fraction, message)] = working.told()
    assert fraction == 1.0
    assert len(message) == 500


@pytest.mark.parametrize("fraction", [50, -1, float("nan"), float("inf")])
def test_progress_that_is_no_fraction_raises_an_error_with_the_remedy(fraction: float) -> None:
    working = Recorded()
    with pytest.raises(ValueError, match=r"from 0 to 1.*done / all"):
        working.task.progress(fraction)
    assert working.told() == []


def test_progress_is_reported_before_the_checkpoint_that_follows_it() -> None:
    working = Recorded()
    working.task.progress(0.5)
    working.task.checkpoint(b"half")
    assert [report[0] for report in working.told()] == ["progressed", "checkpointed"]


def test_only_the_newest_of_the_unfetched_checkpoints_is_kept() -> None:
    saving = Recorded()
    for number in range(100):
        saving.task.checkpoint(b"%d" % number)
    [(*_, sequence, _digest, data, _uri)] = saving.told()
    assert (sequence % 1_000_000, data) == (100, b"\x0099")


def test_a_checkpoint_uri_may_be_a_path() -> None:
    saving = Recorded()
    saving.task.checkpoint(uri=Path("/data/state"))
    [report] = saving.told()
    assert report[-2:] == (None, "/data/state")
    assert is_report(report)


def test_a_relative_path_is_told_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt and the disk guard are elsewhere. A text that names no file here is kept."""
    monkeypatch.chdir(tmp_path)
    Path("step-1").touch()
    for uri, told in (
        (Path("ckpt/step-2"), f"{tmp_path}/ckpt/step-2"),
        ("step-1", f"{tmp_path}/step-1"),
        ("run-7", "run-7"),
        ("s3://bucket/step-1", "s3://bucket/step-1"),
    ):
        saving = Recorded()
        saving.task.checkpoint(uri=uri)
        assert saving.told()[0][-1] == told


@pytest.mark.parametrize("uri", ["", "a\0b", "half \ud800", "x" * 2049])
def test_a_uri_that_no_database_takes_is_refused_at_once(uri: str) -> None:
    saving = Recorded()
    with pytest.raises(ValueError, match="1 to 2048 characters"):
        saving.task.checkpoint(uri=uri)
    assert saving.told() == []


@pytest.mark.parametrize("uri", [3, b"/data", object()])
def test_a_uri_of_another_type_is_refused_at_once(uri: Any) -> None:
    with pytest.raises(TypeError):
        Recorded().task.checkpoint(uri=uri)


def test_progress_message_is_reported_without_characters_databases_refuse() -> None:
    working = Recorded()
    working.task.progress(message="a\0b\ud800c")
    [report] = working.told()
    assert report[-1] == "a\N{REPLACEMENT CHARACTER}b?c"
    assert is_report(report)


def test_a_stop_notice_wakes_waiting_code_and_calls_each_callback_once() -> None:
    task = Recorded().task
    called: list[str] = []
    task.call_on_stop(lambda: called.append("before"))
    assert not task.should_stop
    assert not task.wait_for_stop(0)
    task.give_notice()
    task.give_notice()
    task.call_on_stop(lambda: called.append("after"))
    assert task.should_stop
    assert task.wait_for_stop(None)
    assert called == ["before", "after"]


def test_except_exception_does_not_catch_stopped() -> None:
    def careless_loop() -> None:
        try:
            raise Stopped
        except Exception:
            pytest.fail("Stopped was swallowed")

    with pytest.raises(Stopped):
        careless_loop()


def test_a_rank_waits_until_all_are_ready_and_then_knows_the_rendezvous() -> None:
    task = Recorded(rank=1, world_size=4).task
    waited: list[bool] = []
    waiting = threading.Thread(target=lambda: waited.append(task.wait_for_go()))
    waiting.start()
    assert task.rank_zero_address == ""
    task.go("10.0.0.7:4711")
    task.go("10.0.0.8:4711")
    waiting.join(10)
    assert waited == [True]
    assert (task.rank, task.world_size, task.rank_zero_address) == (1, 4, "10.0.0.7:4711")


def test_a_rank_with_a_stop_notice_does_not_wait_for_others() -> None:
    task = Recorded(rank=1, world_size=4).task
    task.give_notice()
    assert not task.wait_for_go()


def test_a_rank_learns_which_others_have_left() -> None:
    task = Recorded(rank=1, world_size=4).task
    task.go("10.0.0.7:4711")
    assert (task.members, task.world_changed) == ((0, 1, 2, 3), False)
    task.resize((0, 1, 3))
    assert (task.members, task.world_size, task.world_changed) == ((0, 1, 3), 3, True)
    assert task.accept_world() == (0, 1, 3)
    assert not task.world_changed
    task.resize((0, 1))
    task.resize((0, 1, 3))  # it was overtaken on its way
    assert (task.accept_world(), task.world_size) == ((0, 1), 2)
    task.resize((0, 1))
    assert not task.world_changed


def test_a_rank_learns_at_its_next_checkpoint_which_others_have_joined() -> None:
    task = Recorded(rank=1, world_size=2).task
    task.go("10.0.0.7:4711")
    told: list[Workers] = []
    task.on_resize(told.append)
    task.resize((0, 1, 2), 1)
    task.resize((0, 1, 2, 4), 4)
    task.resize((0, 1, 2, 3), 3)  # it was overtaken on its way
    assert (told, task.workers) == ([], Workers(4, (0, 1, 2, 4)))
    task.checkpoint()
    task.checkpoint()
    assert told == [Workers(4, (0, 1, 2, 4))]


def test_a_rank_that_joins_begins_with_the_world_that_it_joined() -> None:
    task = Recorded(rank=5, world_size=3).task
    told: list[Workers] = []
    task.resize((0, 1, 5), 7)
    task.go("10.0.0.7:4711")
    task.on_resize(told.append)
    task.checkpoint()
    assert (task.workers, task.world_changed, told) == ((7, (0, 1, 5)), False, [])


def test_only_rank_zero_saves_checkpoints() -> None:
    second = Recorded(rank=1, world_size=2)
    second.task.checkpoint({"step": 3})
    second.task.checkpoint(uri="s3://bucket/state")
    assert second.told() == []


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1")])
def test_a_rendezvous_port_is_reserved_until_it_is_closed(
    host: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    meeting = RendezvousPort(host)
    announce_rendezvous(meeting.address)
    place = host, int(os.environ["MASTER_PORT"])
    assert os.environ["MASTER_ADDR"] == shown
    with pytest.raises(OSError, match="in use"):
        socket.create_server(place, family=family_of(host)).close()
    meeting.close()
    socket.create_server(place, family=family_of(host)).close()


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
