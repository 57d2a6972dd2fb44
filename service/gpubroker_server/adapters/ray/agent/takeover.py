"""Finds the runs and processes that an earlier agent of this node left. The search changes nothing, so it
can be repeated."""

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
"""The time within which a runner must answer `describe`. Otherwise it is ended."""

_MARK = re.compile(r"(.+?):(\d+)(?::(\d+))?")


class TakenOver(NamedTuple):
    """The runs and processes that an earlier agent left. All these runs are in the table of runs."""

    processes: list[RunnerProcess]
    """The processes that can still take orders."""
    lost: list[tuple[AgentRun, RunRecord]]
    """The runs whose process can no longer take orders, each with its record."""
    strays: list[AgentRun]
    """The runs of which only processes were found, but no record and no runner."""
    external: list[RunRecord]
    """The records of external processes."""
    blank: list[Any]
    """The handles of runners without runs. The pool starts other runners with this agent's configuration."""


async def take_over(
    files: RunFiles, runners: RayRunners, config: AgentConfig, table: RunTable, pool: RunnerPool
) -> TakenOver:
    """Take over all runs and processes that an earlier agent left. Nothing is taken over if any of them
    cannot be read.

    Raises UnreadableRecord, OSError and RayError.
    """
    records = files.records()
    names = await asyncio.to_thread(runners.names)
    handles = {name: await asyncio.to_thread(runners.find, name) for name in names}
    recorded = [(record, handles.pop(record.runner, None)) for record in records]
    others = [
        (name, runner, await _described(runner)) for name, runner in handles.items() if runner is not None
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
    """Return all runs of this broker that have a process on this node, with or without a record.

    Every process of the machine is examined. A process belongs to a run if its environment has the run's
    marks, or if it has the run's log open, as the first process of a run has. The marks name the node,
    because several nodes may be on one machine.
    """
    table = process_table()
    keys: set[RunKey | None] = set()
    for pid in table.keys() - ancestors(os.getpid(), table):
        marks = marks_of(pid)
        if (marks.get(INSTANCE_MARK), marks.get(NODE_MARK)) == (instance, node):
            keys.add(_key_of(marks.get(RUN_MARK, "")))
        keys |= set(map(files.key_of_log, files_opened_by(pid)))
    return {key for key in keys if key is not None}


def _key_of(mark: str) -> RunKey | None:
    match = _MARK.fullmatch(mark)
    return None if match is None else RunKey(match[1], int(match[2]), int(match[3] or 0))


def _take_run(
    record: RunRecord, runner: Any | None, table: RunTable, pool: RunnerPool, processes: list[RunnerProcess]
) -> bool:
    """Take over the run of a record. Return True if its process can still take orders."""
    order = RunOrder(
        *record.key[:2], kind="", rank=record.rank, leases=record.leases, memory_mb=record.memory_mb
    )
    run = _note(AgentRun(order, shared=False, ordered_at=None), table)
    if runner is None:
        return False
    # A process of a newer release than the agent that started it may also speak other protocols.
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
    """Take over a runner that has runs. Return False if it has none or is gone."""
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
    """Return the description of a runner; None if it does not answer or shares no protocol with this
    agent."""
    try:
        return await describe(runner, ANSWER_SECONDS)
    except (RayError, TimeoutError, ValueError):
        return None
