"""Which logs are asked for, and what is done with what agents tell."""

from gpubroker_server.core.domain.orders import Logged, LogName
from gpubroker_server.core.domain.task import members_of
from gpubroker_server.core.domain.units import Fence, Instant, NodeName, TaskId
from gpubroker_server.core.lifecycle.run_logs import (
    FOLLOWED_SECONDS,
    FollowedLogs,
    KnownLog,
    WantedLog,
    cut_between,
    is_kept,
    wanted_logs,
)
from gpubroker_server.core.world.world import World

from tests.builders import NOW, a_device, a_task, a_world, holding
from tests.core.gangs import a_gang, admit_all, bundles

LOG = LogName(TaskId("t1"), Fence(1), 0, "stdout")


def told(data: bytes = b"", first_byte: int = 0, *, is_final: bool = False, at: float = 0.0) -> Logged:
    return Logged(LOG.task, LOG.fence, Instant(NOW + at), "stdout", first_byte, data, is_final)


def followed(since: float = 0.0, at: float = 0.0, log: LogName = LOG, gateway: str = "a") -> FollowedLogs:
    return FollowedLogs(gateway, Instant(NOW + at), {log: Instant(NOW + since)})


def asked(world: World, *given: FollowedLogs, now: float = 0.0) -> dict[LogName, WantedLog]:
    return wanted_logs(world, given, Instant(NOW + now))


def test_the_logs_of_running_tasks_are_asked_for_while_somebody_reads_them() -> None:
    n2, n3 = a_device(node="n2"), a_device(node="n3")
    world = a_world(n2, n3, holding(a_task("t1"), "n2/gpu0"), holding(a_task("t2", gpu_mb=0), node="n3"))
    second = LOG._replace(task=TaskId("t2"), stream="stderr")
    assert asked(world) == {}
    assert asked(world, followed(), followed(log=second, gateway="b")) == {
        LOG: WantedLog(NodeName("n2"), NOW),
        second: WantedLog(NodeName("n3"), NOW),
    }


def test_of_several_readers_the_newest_is_waited_for() -> None:
    world = a_world(holding(a_task("t1"), "gpu0"))
    readers = [followed(since=since, gateway=name) for name, since in (("a", 1.0), ("b", 3.0), ("c", 2.0))]
    assert asked(world, *readers)[LOG].since == NOW + 3.0


def test_the_logs_of_a_gateway_that_is_gone_are_not_asked_for() -> None:
    world = a_world(holding(a_task("t1"), "gpu0"))
    assert asked(world, followed(), now=FOLLOWED_SECONDS - 0.1)
    assert not asked(world, followed(), now=FOLLOWED_SECONDS)


def test_runs_that_are_over_print_nothing_more() -> None:
    world = a_world(holding(a_task("t1"), "gpu0", fence=Fence(2)), a_task("t2"))
    assert not asked(world, followed())
    assert not asked(world, followed(log=LOG._replace(task=TaskId("t2"), fence=Fence(0))))
    assert not asked(world, followed(log=LOG._replace(task=TaskId("none"))))


def test_each_rank_of_a_gang_is_asked_where_it_runs() -> None:
    world = a_world(a_gang("t1", *bundles(2, gpu_mb=50_000)), a_device(node="n1"), a_device(node="n2"))
    admit_all(world)
    ranks = [LOG._replace(rank=rank) for rank in (0, 1, 2)]
    found = asked(world, *(followed(log=log, gateway=str(log.rank)) for log in ranks))
    assert [found[log].node for log in ranks[:2]] == [m.node for m in members_of(world.tasks[TaskId("t1")])]
    assert ranks[2] not in found


def test_what_was_told_before_is_not_kept_again() -> None:
    known, reader = KnownLog(10, NOW), WantedLog(NodeName("n1"), NOW)
    assert is_kept(told(b"new", 10), known, reader)
    assert is_kept(told(b"later", 12), known, reader)
    assert not is_kept(told(b"old", 9), known, reader)
    assert is_kept(told(b"old", 0, is_final=True), known, None), "the whole log replaces its parts"


def test_log_answer_after_the_whole_log_of_an_ended_run_is_not_kept() -> None:
    """Such a run is not wanted any more, and what is kept of it is not known."""
    assert not is_kept(told(b"late"), KnownLog(), None)


def test_an_answer_without_news_is_kept_for_a_reader_who_waits_for_it() -> None:
    waits = WantedLog(NodeName("n1"), Instant(NOW + 5.0))
    assert not is_kept(told(at=6.0), KnownLog(), None)
    assert is_kept(told(at=6.0), KnownLog(), waits)
    assert is_kept(told(at=6.0), KnownLog(0, Instant(NOW + 4.0)), waits)
    assert not is_kept(told(at=6.0), KnownLog(0, Instant(NOW + 5.0)), waits)


def test_of_a_long_log_the_first_and_the_last_half_of_the_limit_are_kept() -> None:
    assert cut_between(told(b"x" * 40, 60), 100) is None
    assert cut_between(told(b"x" * 40, 61), 100) == (50, 51)
    assert cut_between(told(b"x" * 40, 960), 100) == (50, 950)


def test_a_part_knows_its_log_and_its_end() -> None:
    part = told(b"four", first_byte=3)
    assert (part.log, part.end_byte) == (LOG, 7)
