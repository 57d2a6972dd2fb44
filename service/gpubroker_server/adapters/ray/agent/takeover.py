"""What an earlier agent of this node left behind. Looking changes nothing, so that it can be done again."""

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

from gpubroker.runtime.messages import RunKey, RunOrder
from ray.exceptions import RayError

from gpubroker_server.adapters.ray.agent.handshake import describe
from gpubroker_server.adapters.ray.agent.orphans import strays_of
from gpubroker_server.adapters.ray.agent.run_records import Card, RunFiles
from gpubroker_server.adapters.ray.agent.run_table import Run, RunBook
from gpubroker_server.adapters.ray.agent.runner_pool import Pool
from gpubroker_server.adapters.ray.agent.runner_process import Lane
from gpubroker_server.adapters.ray.agent.runners import Runners
from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.processes import process_id

ANSWER_SECONDS = 10.0
"""For a runner to say who it is; one that does not is of no use any more."""


class Inheritance(NamedTuple):
    carded: list[tuple[Card, Any | None]]
    """Runs, each with its runner's handle if Ray still has it."""
    others: list[tuple[str, Any, dict[str, Any] | None]]
    """Name and handle of each other runner, and what it says of itself."""
    marked: set[RunKey]
    """Runs of which some process is there, whoever else may know of them."""


class TakenOver(NamedTuple):
    """Everything has its place in the book by now."""

    lanes: list[Lane]
    """Processes that somebody can still talk to."""
    lost: list[tuple[Run, Card]]
    """Runs of which that is not so."""
    strays: list[Run]
    """Runs of which nothing is known but that processes of theirs are there."""
    outsiders: list[Card]
    blank: list[Any]
    """Handles of runners that run nothing. They are soon made again, in the way this agent was told."""


async def look_around(files: RunFiles, runners: Runners, config: AgentConfig) -> Inheritance:
    """Raises UnreadableCard, OSError and RayError: what cannot be found out is not known to be absent."""
    cards = files.cards()
    names = await asyncio.to_thread(runners.names)
    found = {name: await asyncio.to_thread(runners.find, name) for name in names}
    carded = [(card, found.pop(card.runner, None)) for card in cards]
    others = [(name, runner, await _said_of(runner)) for name, runner in found.items() if runner is not None]
    marked = await asyncio.to_thread(strays_of, config.instance, config.node, files)
    return Inheritance(carded, others, marked)


def take_over(left: Inheritance, book: RunBook, pool: Pool) -> TakenOver:
    """Nothing is taken over if some of it cannot be. Raises OSError."""
    took = TakenOver([], [], [], [], [])
    try:
        for card, runner in left.carded:
            if not card.runner:
                took.outsiders.append(card)
            elif not _take_run(card, runner, book, pool, took.lanes):
                took.lost.append((book.runs[card.key], card))
        for name, runner, told in left.others:
            if not _take_runner(name, runner, told, book, pool, took.lanes):
                took.blank.append(runner)
    except BaseException:
        for lane in took.lanes:
            lane.watched.close()
        raise
    took.strays.extend(_strays(left.marked, book))
    return took


def _take_run(card: Card, runner: Any | None, book: RunBook, pool: Pool, lanes: list[Lane]) -> bool:
    """Whether somebody can still talk to it."""
    order = RunOrder(*card.key[:2], kind="", rank=card.rank, leases=card.leases, memory_mb=card.memory_mb)
    run = _note(Run(order, shared=False), book)
    if runner is None:
        return False
    try:
        run.lane = pool.adopt(card.runner, runner, card.process, shared=False)
    except ProcessLookupError:
        return False
    run.lane.runs.add(card.key)
    lanes.append(run.lane)
    return True


def _take_runner(
    name: str, runner: Any, told: dict[str, Any] | None, book: RunBook, pool: Pool, lanes: list[Lane]
) -> bool:
    """Whether it runs anything."""
    if told is None or not told["runs"]:
        return False
    shared = told["shared"]
    try:
        process = process_id(told["pid"])
        lane = pool.adopt(name, runner, process, shared=shared, protocol=told["protocol"])
    except ProcessLookupError:
        return False
    lanes.append(lane)
    for wire in told["runs"]:
        run = _note(Run(RunOrder.from_wire(wire), shared=shared, lane=lane), book)
        lane.runs.add(run.key)
    return True


def _strays(marked: set[RunKey], book: RunBook) -> Iterator[Run]:
    for key in sorted(marked - book.runs.keys()):
        yield _note(Run(RunOrder(key.task, key.fence, kind="", rank=key.rank), shared=False), book)


def _note(run: Run, book: RunBook) -> Run:
    book.runs[run.key] = run
    book.note_fence(run.key)
    return run


async def _said_of(runner: Any) -> dict[str, Any] | None:
    """None if it does not answer, or speaks no form that is spoken here."""
    try:
        return await describe(runner, ANSWER_SECONDS)
    except (RayError, TimeoutError, ValueError):
        return None
