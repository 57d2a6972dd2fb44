"""Answers that take long: one at a time, with other requests in between."""

import asyncio
import itertools
import threading
from collections.abc import Generator
from typing import Any

import pytest
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.http.problems import Problem
from gpubroker_server.http.waiters import OneAtATime, run_in_thread

from tests.gateway.harness import Client, Gateway, before, problem, until


async def test_answers_are_computed_one_at_a_time_first_come_first_served() -> None:
    desk, order = OneAtATime("plans", max_waiting=2), list[str]()

    async def ask(name: str) -> None:
        async with desk.slot():
            order.append(f"{name} begins")
            await asyncio.sleep(0)
            order.append(f"{name} ends")

    await asyncio.gather(*map(ask, "abc"))
    assert order == [f"{name} {what}" for name in "abc" for what in ("begins", "ends")]


async def test_a_request_beyond_the_queue_is_refused_as_retryable() -> None:
    desk, go = OneAtATime("plans", max_waiting=1), asyncio.Event()

    async def ask() -> None:
        async with desk.slot():
            await go.wait()

    asked = [asyncio.create_task(ask()) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Problem, match="one at a time; one is being computed and 1 more") as refusal:
        await ask()
    assert (refusal.value.kind.status, refusal.value.kind.retryable) == (429, True)
    go.set()
    await before(5.0, asyncio.gather(*asked))
    await before(5.0, ask())


async def test_a_cancelled_request_leaves_its_place_in_the_queue() -> None:
    desk, go = OneAtATime("plans", max_waiting=1), asyncio.Event()

    async def ask() -> None:
        async with desk.slot():
            await go.wait()

    first, gone = asyncio.create_task(ask()), asyncio.create_task(ask())
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    second = asyncio.create_task(ask())
    go.set()
    await before(5.0, asyncio.gather(first, second))


async def test_the_event_loop_goes_on_while_a_thread_computes_an_answer() -> None:
    others_had_a_turn = threading.Event()

    def steps() -> Generator[None, None, bool]:
        yield
        return others_had_a_turn.wait(5.0)

    answer = asyncio.create_task(run_in_thread(steps(), Seconds(5.0)))
    await asyncio.sleep(0)
    others_had_a_turn.set()
    assert await answer


async def test_an_answer_that_takes_too_long_is_stopped() -> None:
    with pytest.raises(TimeoutError):
        await before(5.0, run_in_thread((None for _ in itertools.count()), Seconds(0.01)))


async def test_an_answer_is_stopped_when_its_request_is_cancelled() -> None:
    began, ended = threading.Event(), threading.Event()

    def steps() -> Generator[None, None, None]:
        try:
            while True:
                began.set()
                yield
        finally:
            ended.set()

    answer = asyncio.create_task(run_in_thread(steps(), Seconds(60.0)))
    await asyncio.to_thread(began.wait, 5.0)
    answer.cancel()
    await asyncio.wait([answer])
    assert await asyncio.to_thread(ended.wait, 5.0)


async def test_second_plan_at_the_same_time_is_refused_and_a_later_one_answered(
    gateway: Gateway, api: Client
) -> None:
    asked = {"components": [{"name": "a", "resources": {"cpu": 1}}]}
    async with gateway.parts.plans.slot():
        refusal = await api.post("/plan", json=asked)
        assert problem(refusal, 429, "too-many-requests")["retryable"] is True
        assert refusal.headers["retry-after"] == "1"
    assert (await api.post("/plan", json=asked)).status_code == 200


async def test_other_requests_run_between_two_of_many_explanations(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(resources={"gpu_mb": 1})
    order, is_over = list[str](), asyncio.Event()

    async def ask(name: str) -> int:
        status = (await api.get(f"/tasks/{task_id}/explain")).status_code
        order.append(name if status == 200 else "refused")
        return status

    async def tick() -> None:
        while not is_over.is_set():
            order.append("tick")
            await asyncio.sleep(0)

    desk = gateway.parts.answers
    async with desk.slot():
        asked = asyncio.gather(*map(ask, "abcdefghijklmnopqrst"))
        await until(lambda: desk._waiting + order.count("refused") == 20)
    ticker = asyncio.create_task(tick())
    statuses = await before(10.0, asked)
    is_over.set()
    await ticker
    assert sorted(statuses) == [200] * 16 + [429] * 4
    told = [one for one in order if one != "refused"]
    answered = [at for at, one in enumerate(told) if one != "tick"]
    assert len(answered) == 16
    assert all("tick" in told[one:other] for one, other in itertools.pairwise(answered))


async def test_task_that_ends_while_its_explanation_is_queued_is_shown_as_ended(
    gateway: Gateway, api: Client
) -> None:
    task_id = await api.submit()
    desk = gateway.parts.answers
    async with desk.slot():
        asked = asyncio.ensure_future(api.get(f"/tasks/{task_id}/explain"))
        await until(lambda: desk._waiting == 1)
        await gateway.end(task_id)
    assert (await before(5.0, asked)).json()["state"] == "succeeded"


async def test_explanations_are_queued_and_refused_beyond_the_queue(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(resources={"gpu_mb": 1})

    def ask() -> list[Any]:
        return [api.get(f"/tasks/{task_id}/explain"), api.post("/tasks/simulate", json={})]

    desk = gateway.parts.answers
    async with desk.slot():
        waiting = [asyncio.ensure_future(one) for _ in range(8) for one in ask()]
        await until(lambda: desk._waiting == len(waiting))
        for one in ask():
            problem(await one, 429, "too-many-requests")
        assert not any(one.done() for one in waiting)
    assert {(await one).status_code for one in waiting} == {200}
