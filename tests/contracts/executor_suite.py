"""What the leader relies on, whatever executor it has: a class per executor inherits this."""

import json
from functools import partial
from typing import Any

import pytest
from gpubroker_server.core.domain.orders import (
    Ended,
    Ending,
    ForgetOrder,
    Gone,
    Ready,
    Sampled,
    Started,
    StartOrder,
)
from gpubroker_server.core.domain.units import Fence, TaskId

from tests.contracts.executor_bench import GPU, Bench, Run

LONG_SECONDS = 600.0
NOWHERE = "127.0.0.1:9"
"""The discard port, as a place where nobody meets."""


async def a_wait(bench: Bench, seconds: Any = 0.0, **given: Any) -> Run:
    """A run that waits so long, unless it is given notice."""
    return await bench.start("wait", arguments=json.dumps({"kwargs": {"seconds": seconds}}).encode(), **given)


async def a_gang(bench: Bench, task: str, seconds: Any = 0.0, **given: Any) -> list[Run]:
    """Two runs of one claim, on one node and one device, each ready to begin."""
    given = {"task": task, "world_size": 2, "gpu_mb": 1000, **given}
    ranks = [await a_wait(bench, seconds, rank=rank, **given) for rank in (0, 1)]
    for rank in ranks:
        await rank.first(Ready)
    return ranks


async def has_settled(bench: Bench) -> None:
    """What was ordered before has been looked at: orders of one node keep their order."""
    await (await a_wait(bench)).first(Gone)


class ExecutorSuite:
    @pytest.fixture
    def bench(self) -> Bench:
        raise NotImplementedError("each executor brings its own")

    async def test_a_node_is_seen_with_its_devices_and_measured(self, bench: Bench) -> None:
        seen = await bench.node()
        assert [device.uuid for device in seen.devices] == ["GPU-sim-0", "GPU-sim-1"]
        samples = await bench.until(lambda: bench.samples)
        assert isinstance(samples[0], Sampled)
        assert GPU in {sample.device for sample in samples[0].samples}
        assert bench.executor.status()["state"] == "connected"
        [machine, *_] = await bench.until(lambda: bench.node_samples)
        assert machine.node == seen.node.name
        assert 0 < machine.memory_available_mb <= machine.memory_total_mb

    async def test_devices_are_measured_when_the_leader_asks(self, bench: Bench) -> None:
        node = (await bench.node()).node.name
        for _ in range(3):
            before = len(bench.samples)
            bench.executor.measure([node])
            await bench.until(partial(lambda first: bench.samples[first:], before))

    async def test_a_run_starts_ends_and_is_gone_in_this_order(self, bench: Bench) -> None:
        run = await a_wait(bench, gpu_mb=1000)
        gone = await run.first(Gone)
        assert run.order_of_kinds() == ["Started", "Ended", "Gone"]
        assert await run.result() is None
        [sample] = [sample for sample in gone.samples if sample.device == GPU]
        assert f"{run.order.task}:1" not in sample.by_holder

    async def test_a_claim_starts_once(self, bench: Bench) -> None:
        run = await a_wait(bench, gpu_mb=1000)
        await run.first(Gone)
        before = list(run.reports)
        await a_wait(bench, task=run.order.task)
        await has_settled(bench)
        assert run.reports == before

    async def test_a_claim_starts_once_also_while_it_runs(self, bench: Bench) -> None:
        run = await a_wait(bench, LONG_SECONDS)
        await run.first(Started)
        await a_wait(bench, task=run.order.task)
        await has_settled(bench)
        assert run.order_of_kinds() == ["Started"]
        await run.stop(grace_seconds=0)
        await run.first(Gone)

    async def test_a_later_claim_of_the_same_task_starts_and_an_earlier_one_does_not(
        self, bench: Bench
    ) -> None:
        second = await a_wait(bench, task="claimed-twice", fence=2)
        await second.first(Gone)
        first = await a_wait(bench, task="claimed-twice", fence=1)
        third = await a_wait(bench, task="claimed-twice", fence=3)
        assert await third.result() is None
        await has_settled(bench)
        assert first.never_began()

    async def test_a_start_for_another_incarnation_never_starts_then_or_later(self, bench: Bench) -> None:
        refused = await a_wait(bench, incarnation="somebody.1")
        assert (await refused.first(Ended)).ending is Ending.NEVER_STARTED
        assert (await refused.first(Gone)).proof == "never_started"
        await a_wait(bench, task=refused.order.task)
        await has_settled(bench)
        assert refused.never_began()

    async def test_a_start_without_what_it_needs_is_left_out(self, bench: Bench) -> None:
        node = (await bench.node()).node
        order = StartOrder(TaskId("bare"), Fence(1), node.name, node.incarnation, (), shareable=False)
        await bench.send(order)
        await has_settled(bench)
        assert (order.task, order.fence) not in bench.heard

    async def test_a_run_that_is_given_notice_gives_way(self, bench: Bench) -> None:
        run = await a_wait(bench, LONG_SECONDS, gpu_mb=1000)
        await run.first(Started)
        await run.stop(grace_seconds=20)
        assert (await run.first(Ended)).ending is Ending.STOPPED
        assert (await run.first(Gone)).proof == "process_absent"

    async def test_a_run_without_a_grace_period_is_killed(self, bench: Bench) -> None:
        run = await a_wait(bench, LONG_SECONDS, gpu_mb=1000)
        await run.first(Started)
        await run.stop(grace_seconds=0)
        ended = await run.first(Ended)
        assert ended.ending is Ending.LOST
        assert ended.failure is not None
        assert ended.failure.kind == "killed"
        await run.first(Gone)

    async def test_a_stop_for_a_run_that_was_never_heard_of_keeps_it_from_starting(
        self, bench: Bench
    ) -> None:
        node = (await bench.node()).node
        ghost = StartOrder(TaskId("ghost"), Fence(7), node.name, node.incarnation, (), shareable=False)
        run = Run(bench, ghost)
        await run.stop(grace_seconds=5)
        assert (await run.first(Gone)).proof == "never_started"
        await a_wait(bench, task="ghost", fence=7)
        await has_settled(bench)
        assert run.never_began()

    async def test_a_stop_for_a_run_that_is_gone_and_forgotten_says_so_again(self, bench: Bench) -> None:
        run = await a_wait(bench, gpu_mb=1000)
        await run.first(Gone)
        await run.forget()
        await run.stop(grace_seconds=0)
        await bench.until(lambda: run.order_of_kinds() == ["Started", "Ended", "Gone", "Gone"])

    async def test_arguments_that_make_no_sense_fail_their_run_and_nothing_else(self, bench: Bench) -> None:
        wrong = await a_wait(bench, "soon")
        ended = await wrong.first(Ended)
        assert ended.ending is Ending.FAILED
        assert ended.failure is not None
        assert ended.failure.kind == "exception"
        await wrong.first(Gone)
        await has_settled(bench)

    async def test_a_new_term_hears_again_what_is_not_forgotten(self, bench: Bench) -> None:
        """A leader that died before its commit leaves it to the next one."""
        run = await a_wait(bench, gpu_mb=1000)
        await run.first(Gone)
        assert (run.order.task, 1, 0) in (await bench.announce_again()).runs
        await bench.until(lambda: run.order_of_kinds() == ["Started", "Ended", "Gone"] * 2)
        await run.forget()
        await has_settled(bench)
        assert (run.order.task, 1, 0) not in (await bench.announce_again()).runs

    async def test_a_run_goes_on_while_terms_change(self, bench: Bench) -> None:
        run = await a_wait(bench, LONG_SECONDS)
        await run.first(Started)
        assert (run.order.task, 1, 0) in (await bench.announce_again()).runs
        await run.stop(grace_seconds=20)
        assert (await run.first(Ended)).ending is Ending.STOPPED

    async def test_forgetting_what_nobody_has_heard_of_changes_nothing(self, bench: Bench) -> None:
        node = (await bench.node()).node
        await bench.send(ForgetOrder(TaskId("unheard-of"), Fence(1), node.name, node.incarnation))
        await has_settled(bench)

    async def test_a_rank_says_where_it_could_be_met_and_waits_to_be_told_to_begin(
        self, bench: Bench
    ) -> None:
        first, second = await a_gang(bench, "gang-waits")
        host, _, port = (await first.first(Ready)).address.rpartition(":")
        assert host
        assert int(port) > 0
        await has_settled(bench)
        assert first.order_of_kinds() == second.order_of_kinds() == ["Started", "Ready"]
        await second.go(NOWHERE)
        await second.first(Gone)
        assert second.order_of_kinds() == ["Started", "Ready", "Ended", "Gone"]
        assert first.order_of_kinds() == ["Started", "Ready"]
        await first.go(NOWHERE)
        await first.first(Gone)

    async def test_a_rank_that_is_told_twice_begins_once(self, bench: Bench) -> None:
        first, second = await a_gang(bench, "gang-told-twice")
        for rank in (first, second, first):
            await rank.go(NOWHERE)
        await first.first(Gone)
        await first.go(NOWHERE)
        await has_settled(bench)
        assert first.order_of_kinds() == ["Started", "Ready", "Ended", "Gone"]

    async def test_a_rank_that_is_told_to_begin_before_it_is_ready_begins_then(self, bench: Bench) -> None:
        early = await a_wait(bench, task="gang-told-early", world_size=2)
        await early.go(NOWHERE)
        assert await early.result() is None
        assert "Ready" in early.order_of_kinds()

    async def test_who_never_started_is_told_to_begin_in_vain(self, bench: Bench) -> None:
        refused = await a_wait(bench, incarnation="somebody.1", world_size=2)
        await refused.go(NOWHERE)
        await has_settled(bench)
        assert refused.order_of_kinds() == ["Ended", "Gone"]

    async def test_ranks_that_wait_give_way_one_by_one(self, bench: Bench) -> None:
        first, second = await a_gang(bench, "gang-stopped", LONG_SECONDS)
        await second.stop(grace_seconds=20)
        assert (await second.first(Ended)).ending is Ending.STOPPED
        await second.first(Gone)
        assert first.order_of_kinds() == ["Started", "Ready"]
        await first.stop(grace_seconds=0)
        assert (await first.first(Ended)).ending is Ending.LOST
        await first.first(Gone)

    async def test_what_ranks_use_of_one_device_is_told_apart(self, bench: Bench) -> None:
        first, second = await a_gang(bench, "gang-measured")
        names = {"gang-measured:1", "gang-measured:1:1"}
        await bench.until(lambda: any(names <= s.by_holder.keys() for h in bench.samples for s in h.samples))
        await first.stop(grace_seconds=20)
        gone = await first.first(Gone)
        [sample] = [sample for sample in gone.samples if sample.device == GPU]
        assert (sample.used_mb, sample.by_holder) == (1000, {"gang-measured:1:1": 1000})
        await second.stop(grace_seconds=20)
        await second.first(Gone)

    async def test_a_new_term_hears_again_which_ranks_are_ready(self, bench: Bench) -> None:
        first, second = await a_gang(bench, "gang-taken-over")
        assert {(first.order.task, 1, 0), (first.order.task, 1, 1)} <= set(
            (await bench.announce_again()).runs
        )
        await bench.until(lambda: second.order_of_kinds() == ["Started", "Ready"] * 2)
        await first.go(NOWHERE)
        await second.go(NOWHERE)
        assert (await first.result(), await second.result()) == (None, None)

    async def test_a_later_claim_of_a_rank_starts_and_an_earlier_one_does_not(self, bench: Bench) -> None:
        later = await a_wait(bench, task="gang-again", rank=1, world_size=2, fence=2)
        await later.first(Ready)
        earlier = await a_wait(bench, task="gang-again", rank=1, world_size=2, fence=1)
        other = await a_wait(bench, task="gang-again", rank=0, world_size=2, fence=1)
        await other.first(Ready)
        await has_settled(bench)
        assert earlier.never_began()
        for rank in (later, other):
            await rank.stop(grace_seconds=20)
            await rank.first(Gone)
