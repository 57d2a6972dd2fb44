"""Leaders paused past their lease: in the middle of a write, or between a commit and its order.

In the middle of a write: each leader is a process on PostgreSQL that stops itself with SIGSTOP at a boundary
of the statements of one write. Another process waits until its lease is over, takes the term, ends what there
was and gives the memory to another task. Then the paused leader resumes: everything that it still writes must
be refused. Orders: see `late_orders`.
"""

import argparse
import asyncio
import ctypes
import gc
import os
import signal
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from gpubroker_server.ports.store import StaleTerm

from tests.builders import GIB
from tests.chaos.database import a_database
from tests.chaos.evidence import Evidence, add_no_evidence, on_database, run_once
from tests.chaos.faults import Fault
from tests.chaos.operations import OPERATIONS, Operation
from tests.chaos.sweep import (
    Attempt,
    Sweep,
    Undisturbed,
    Violation,
    is_confirmed,
    without_startup_checks,
)
from tests.contracts.scenes import next_term

OF_LEADERS = (
    "admit", "admit a gang", "start", "checkpoint", "finish", "finish and release", "release", "retry",
    "preempt", "release for a preemptor", "consume a pledge", "cancel", "expire", "time out", "quarantine",
    "release from quarantine", "lose a node", "renew the term",
)  # fmt: skip
LEASE_SECONDS = 3.0
"""The default. PostgreSQL ends a session that hangs in a transaction after two seconds."""
_REFUSED, _DONE = 10, 11


@dataclass
class Outcome:
    refused: Counter[str] = field(default_factory=Counter)
    """Operation -> paused leaders whose write was refused."""
    accepted: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Pauses(Sweep):
    def pause_writers(self, pauses: int, seed: int) -> Outcome:
        chance, outcome = Random(f"{seed}/pause"), Outcome()
        known: dict[str, Undisturbed] = {}
        with without_startup_checks():
            asyncio.run(self._initialize())
            for number in range(pauses):
                name = OF_LEADERS[number % len(OF_LEADERS)]
                if name not in known:
                    known[name] = asyncio.run(self._run_undisturbed(Fault.PAUSE, OPERATIONS[name]))
                before_commit = range(len(known[name].boundaries) - 1)
                try:
                    was_done = self._pause(name, OPERATIONS[name], chance.choice(before_commit))
                    (outcome.accepted if was_done else outcome.refused)[name] += 1
                except Violation as violation:
                    outcome.wrong.append(str(violation))
        return outcome

    def _pause(self, name: str, operation: Operation, point: int) -> bool:
        """Whether the paused leader got the answer that its write is done."""
        attempt = asyncio.run(self._lead(operation, name))
        child = os.fork()
        if child == 0:
            answer = _REFUSED
            try:
                gc.disable()
                _end_with_parent()
                with suppress(StaleTerm):
                    is_done = asyncio.run(self._act_and_pause(operation, attempt, point))
                    answer = _DONE if is_done else _REFUSED
            finally:
                os._exit(answer)
        _, status = os.waitpid(child, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            raise Violation(f"{name}: the leader did not pause; status {status}")
        try:
            asyncio.run(self._succeed(attempt))
        finally:
            os.kill(child, signal.SIGCONT)
            _, status = os.waitpid(child, 0)
        asyncio.run(self._check_unchanged(attempt))
        if not os.WIFEXITED(status) or os.WEXITSTATUS(status) not in (_REFUSED, _DONE):
            raise Violation(f"{name}: the paused leader ended with status {status}")
        return os.WEXITSTATUS(status) == _DONE

    async def _lead(self, operation: Operation, name: str) -> Attempt:
        async with self._opened() as (scene, _):
            scene.term = await next_term(scene.store, "paused", LEASE_SECONDS)
            id, before = await self._prepare(scene, operation)
            return Attempt(id, before, scene.world, name)

    async def _act_and_pause(self, operation: Operation, attempt: Attempt, point: int) -> bool:
        async with self._opened(attempt.world) as (scene, fault_point):
            fault_point.arm(Fault.PAUSE, point)
            return await is_confirmed(operation.act(scene, attempt.id))

    async def _succeed(self, attempt: Attempt) -> None:
        """Lead after the paused leader's lease, and give its memory to another task."""
        async with self._opened() as (scene, _):
            row = await scene.store.leader()
            await asyncio.sleep(max(0.0, row.lease_until - row.at))
            scene.term = await next_term(scene.store, "successor")
            await self._end(scene, attempt.id, attempt.where)
            await scene.begin(f"{attempt.id}-successor", gpu_mb=80 * GIB, gpus=2)
        self._after_takeover = self._footprint()

    async def _check_unchanged(self, attempt: Attempt) -> None:
        if self._footprint() != self._after_takeover:
            raise Violation(f"{attempt.where}: the paused leader wrote something after it resumed")
        async with self._opened() as (scene, _):
            await self._end(scene, attempt.id, attempt.where)


def _end_with_parent() -> None:
    """A paused child would otherwise outlive a parent that was killed."""
    set_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pauses", type=int, default=60, help="leaders paused in the middle of a write")
    parser.add_argument("--orders", type=int, default=60, help="orders sent late to agents on real Ray")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random choices")
    add_no_evidence(parser)


def command(options: argparse.Namespace) -> None:
    records = [record for record in (_writes(options), _orders(options)) if record is not None]
    if any(record["wrong"] or record.get("accepted") for record in records):
        sys.exit(1)


def _writes(options: argparse.Namespace) -> dict[str, Any] | None:
    def run(seed: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder, a_database("postgres", Path(folder)) as url:
            outcome = Pauses(url).pause_writers(options.pauses, seed)
        return {
            "seed": seed,
            "pauses": options.pauses,
            "refused": dict(sorted(outcome.refused.items())),
            "accepted": dict(sorted(outcome.accepted.items())),
            "wrong": outcome.wrong,
        }

    if not options.pauses:
        return None
    evidence = Evidence("pause-writes", ("pauses", "refused", "accepted"), trials=("pauses",))
    return run_once(options, evidence, options.seed, run, **on_database("postgres"))


def _orders(options: argparse.Namespace) -> dict[str, Any] | None:
    def run(seed: int) -> dict[str, Any]:
        from tests.chaos import late_orders  # loads Ray: after the forks above

        return late_orders.run(seed, options.orders)

    if not options.orders:
        return None
    evidence = Evidence("pause-orders", ("pauses", "sent", "refused"), trials=("sent",))
    return run_once(options, evidence, options.seed, run, **on_database("postgres"))
