"""Answers that take long: one at a time, with pauses for everybody else."""

import asyncio
import time
from collections.abc import Generator

import pytest

from service.core.units import Seconds
from service.gateway.problems import Problem
from service.gateway.turns import Turns, in_turns
from tests.gateway.harness import Client, Gateway, before, problem


async def test_answers_are_worked_out_one_after_the_other_in_the_order_they_were_asked_for():
    desk, order = Turns("plans", most_waiting=2), list[str]()

    async def ask(name: str) -> None:
        async with desk.take():
            order.append(f"{name} begins")
            await asyncio.sleep(0)
            order.append(f"{name} ends")

    await asyncio.gather(*map(ask, "abc"))
    assert order == [f"{name} {what}" for name in "abc" for what in ("begins", "ends")]


async def test_who_comes_on_top_of_those_who_may_wait_is_told_to_ask_again():
    desk, go = Turns("plans", most_waiting=1), asyncio.Event()

    async def ask() -> None:
        async with desk.take():
            await go.wait()

    asked = [asyncio.create_task(ask()) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Problem, match="one at a time; one is under way and 1 more") as refusal:
        await ask()
    assert (refusal.value.kind.status, refusal.value.kind.retryable) == (429, True)
    go.set()
    await before(5.0, asyncio.gather(*asked))
    await before(5.0, ask())


async def test_who_waited_and_went_away_leaves_his_place_to_others():
    desk, go = Turns("plans", most_waiting=1), asyncio.Event()

    async def ask() -> None:
        async with desk.take():
            await go.wait()

    first, gone = asyncio.create_task(ask()), asyncio.create_task(ask())
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    second = asyncio.create_task(ask())
    go.set()
    await before(5.0, asyncio.gather(first, second))


def steps(count: int, seconds: float = 0.0) -> Generator[None, None, int]:
    for _ in range(count):
        until_then = time.perf_counter() + seconds
        while time.perf_counter() < until_then:
            pass
        yield
    return count


async def test_everybody_else_has_a_turn_after_each_that_is_over():
    turns_of_others = 0

    async def others() -> None:
        nonlocal turns_of_others
        while True:
            await asyncio.sleep(0)
            turns_of_others += 1

    other = asyncio.create_task(others())
    assert await in_turns(steps(5), Seconds(5.0), 0.0) == 5
    assert turns_of_others >= 4
    turns_of_others = 0
    assert await in_turns(steps(5), Seconds(5.0), 60.0) == 5
    assert turns_of_others == 0
    other.cancel()


async def test_what_takes_too_long_is_given_up():
    with pytest.raises(TimeoutError):
        await in_turns(steps(1000, 0.001), Seconds(0.01))


async def test_a_second_plan_at_a_time_is_put_off_and_the_next_one_is_answered(
    gateway: Gateway, api: Client
) -> None:
    asked = {"components": [{"name": "a", "resources": {"cpu": 1}}]}
    async with gateway.parts.plans.take():
        refusal = await api.post("/plan", json=asked)
        assert problem(refusal, 429, "too-many-requests")["retryable"] is True
        assert refusal.headers["retry-after"] == "1"
    assert (await api.post("/plan", json=asked)).status_code == 200
