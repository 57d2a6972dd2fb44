"""Finds what an earlier agent of this node left behind. Looking changes nothing, so it can be repeated."""

import asyncio
import os
import re
from typing import Any, NamedTuple

from gpubroker.runtime.messages import SPOKEN, RunKey, RunOrder
from gpubroker.runtime.process import INSTANCE_MARK, NODE_MARK, RUN_MARK
from ray.exceptions import RayError

from gpubroker_server.adapters.ray.agent.run_files import RunFiles, RunRecord
from gpubroker_server.adapters.ray.agent.runner_pool import RayRunners, RunnerPool
from gpubroker_server.adapters.ray.agent.runner_process import AgentRun, RunnerProcess, RunTable, describe
from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.processes import (
    ancestors,
    files_opened_by,
    marks_of,
    process_id,
    process_table,
)

ANSWER_SECONDS = 10.0
"""A runner that has not described itself by then is of no use any more."""

_MARK = re.compile(r"(.+?):(\d+)(?::(\d+))?")


class TakenOver(NamedTuple):
    """The runs and processes that an earlier agent left. All of them are in the table of runs by now."""

    processes: list[RunnerProcess]
    """The processes that can still be talked to."""
    lost: list[tuple[AgentRun, RunRecord]]
    """Runs with a process that cannot be talked to."""
    strays: list[AgentRun]
    """Runs of which nothing is known but that processes of theirs are there."""
    external: list[RunRecord]
    blank: list[Any]
    """Handles of runners that run nothing. The pool starts others with this agent's configuration."""


async def take_over(
    files: RunFiles, runners: RayRunners, config: AgentConfig, table: RunTable, pool: RunnerPool
) -> TakenOver:
    """Looks first, and takes over nothing if some of it cannot be found out or taken over.

    Raises UnreadableRecord, OSError and RayError.
    """
    records = files.records()
    names = await asyncio.to_thread(runners.names)
    found = {name: await asyncio.to_thread(runners.find, name) for name in names}
    recorded = [(record, found.pop(record.runner, None)) for record in records]
    others = [
        (name, runner, await _described(runner)) for name, runner in found.items() if runner is not None
    ]
    marked = await asyncio.to_thread(marked_runs, config.instance, config.node, files)
    took = TakenOver([], [], [], [], [])
    try:
        for record, runner in recorded:
            if not record.runner:
                took.external.append(record)
            elif not _take_run(record, runner, table, pool, took.processes):
                took.lost.append((table.runs[record.key], record))
        for name, runner, described in others:
            if not _take_runner(name, runner, described, table, pool, took.processes):
                took.blank.append(runner)
    except BaseException:
        for process in took.processes:
            process.watched.close()
        raise
    for key in sorted(marked - table.runs.keys()):
        order = RunOrder(key.task, key.fence, kind="", rank=key.rank)
        took.strays.append(_note(AgentRun(order, shared=False, ordered_at=None), table))
    return took


def marked_runs(instance: str, node: str, files: RunFiles) -> set[RunKey]:
    """Return all runs of this broker on this node that have a process here, recorded or not.

    Found by the marks in a process's environment, or by a log of this node that it has open, as the process
    that a run begins in has. Another node may be on the same machine. Looks at every process.
    """
    table = process_table()
    found: set[RunKey | None] = set()
    for pid in table.keys() - ancestors(os.getpid(), table):
        marks = marks_of(pid)
        if (marks.get(INSTANCE_MARK), marks.get(NODE_MARK)) == (instance, node):
            found.add(_key_of(marks.get(RUN_MARK, "")))
        found |= set(map(files.key_of_log, files_opened_by(pid)))
    return {key for key in found if key is not None}


def _key_of(mark: str) -> RunKey | None:
    read = _MARK.fullmatch(mark)
    return None if read is None else RunKey(read[1], int(read[2]), int(read[3] or 0))


def _take_run(
    record: RunRecord, runner: Any | None, table: RunTable, pool: RunnerPool, processes: list[RunnerProcess]
) -> bool:
    """Take the run of a record over. Return True if its process can still be talked to."""
    order = RunOrder(
        *record.key[:2], kind="", rank=record.rank, leases=record.leases, memory_mb=record.memory_mb
    )
    run = _note(AgentRun(order, shared=False, ordered_at=None), table)
    if runner is None:
        return False
    # A process that is newer than the agent which started it may speak more than they agreed on.
    protocol = record.protocol if record.protocol in SPOKEN else SPOKEN[0]
    try:
        run.process = pool.adopt(record.runner, runner, record.process, shared=False, protocol=protocol)
    except ProcessLookupError:
        return False
    run.process.runs.add(record.key)
    processes.append(run.process)
    return True


def _take_runner(
    name: str,
    runner: Any,
    described: dict[str, Any] | None,
    table: RunTable,
    pool: RunnerPool,
    processes: list[RunnerProcess],
) -> bool:
    """Take the runner over. Return True if it runs anything."""
    if described is None or not described["runs"]:
        return False
    shared = described["shared"]
    try:
        process = process_id(described["pid"])
        adopted = pool.adopt(name, runner, process, shared=shared, protocol=described["protocol"])
    except ProcessLookupError:
        return False
    processes.append(adopted)
    for wire in described["runs"]:
        run = _note(
            AgentRun(RunOrder.from_wire(wire), shared=shared, process=adopted, ordered_at=None), table
        )
        adopted.runs.add(run.key)
    return True


def _note(run: AgentRun, table: RunTable) -> AgentRun:
    table.runs[run.key] = run
    table.note_fence(run.key)
    return run


async def _described(runner: Any) -> dict[str, Any] | None:
    """Return its description; None if it does not answer, or shares no form with this agent."""
    try:
        return await describe(runner, ANSWER_SECONDS)
    except (RayError, TimeoutError, ValueError):
        return None
