"""Leaders that sleep in the middle of a write, past their lease, and wake up when somebody else leads.

Each is a process of its own on PostgreSQL, stopped by SIGSTOP at some boundary of the statements of one
write. Another process waits until the sleeper's lease is past, takes the term, brings to its end what there
was and gives its memory to somebody else. Then the sleeper goes on: whatever it still writes must be refused.
"""

import asyncio
import ctypes
import gc
import os
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from gpubroker_server.ports.store import StaleTerm

from tests.builders import GIB
from tests.chaos.faults import Fault
from tests.chaos.operations import OPERATIONS, Operation
from tests.chaos.sweep import Broken, Life, Plan, Sweep, migrated_before, said
from tests.contracts.scenes import next_term

OF_LEADERS = (
    "admit", "admit a gang", "start", "checkpoint", "finish", "finish and leave", "release", "retry",
    "preempt", "give way", "take what was pledged", "cancel", "expire", "stop for time", "quarantine",
    "release from quarantine", "lose a node", "renew the term",
)  # fmt: skip
LEASE_SECONDS = 3.0
"""As it is by default: a session that hangs in the middle of a transaction is thrown out after two."""
_REFUSED, _DONE = 10, 11


@dataclass
class Woken:
    refused: Counter[str] = field(default_factory=Counter)
    """Operation -> sleepers whose write was refused."""
    accepted: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Zombies(Sweep):
    def wake(self, pauses: int, seed: int) -> Woken:
        chance, woken = Random(f"{seed}/zombies"), Woken()
        plans: dict[str, Plan] = {}
        with migrated_before():
            asyncio.run(self._settle_in())
            for number in range(pauses):
                name = OF_LEADERS[number % len(OF_LEADERS)]
                if name not in plans:
                    plans[name] = asyncio.run(self._rehearse(Fault.STOP, OPERATIONS[name]))
                before_commit = range(len(plans[name].boundaries) - 1)
                try:
                    was_done = self._pause(name, OPERATIONS[name], chance.choice(before_commit))
                    (woken.accepted if was_done else woken.refused)[name] += 1
                except Broken as broken:
                    woken.wrong.append(str(broken))
        return woken

    def _pause(self, name: str, operation: Operation, point: int) -> bool:
        """Whether the sleeper, once awake, was told that its write is done."""
        life = asyncio.run(self._fall_asleep(operation, name))
        child = os.fork()
        if child == 0:
            answer = _REFUSED
            try:
                gc.disable()
                _end_with_parent()
                with suppress(StaleTerm):
                    answer = _DONE if asyncio.run(self._act_asleep(operation, life, point)) else _REFUSED
            finally:
                os._exit(answer)
        _, status = os.waitpid(child, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            raise Broken(f"{name}: it did not fall asleep; status {status}")
        try:
            asyncio.run(self._lead_instead(life))
        finally:
            os.kill(child, signal.SIGCONT)
            _, status = os.waitpid(child, 0)
        asyncio.run(self._compare(life))
        if not os.WIFEXITED(status) or os.WEXITSTATUS(status) not in (_REFUSED, _DONE):
            raise Broken(f"{name}: the sleeper ended with status {status}")
        return os.WEXITSTATUS(status) == _DONE

    async def _fall_asleep(self, operation: Operation, name: str) -> Life:
        async with self._opened() as (scene, _):
            scene.term = await next_term(scene.store, "sleeper", LEASE_SECONDS)
            id, before = await self._prepare(scene, operation)
            return Life(id, before, scene.world, name)

    async def _act_asleep(self, operation: Operation, life: Life, point: int) -> bool:
        async with self._opened(life.world) as (scene, breaker):
            breaker.arm(Fault.STOP, point)
            return await said(operation.act(scene, life.id))

    async def _lead_instead(self, life: Life) -> None:
        async with self._opened() as (scene, _):
            row = await scene.store.leader()
            await asyncio.sleep(max(0.0, row.lease_until - row.at))
            scene.term = await next_term(scene.store, "heir")
            await self._end(scene, life.id, life.where)
            await scene.begin(f"{life.id}-heir", gpu_mb=80 * GIB, gpus=2)
        self._stamp_of_heir = self._stamp()

    async def _compare(self, life: Life) -> None:
        if self._stamp() != self._stamp_of_heir:
            raise Broken(f"{life.where}: the sleeper wrote something after it woke up")
        async with self._opened() as (scene, _):
            await self._end(scene, life.id, life.where)


def _end_with_parent() -> None:
    """Nobody wakes a sleeper whose parent was ended."""
    set_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def record(seed: int, pauses: int, woken: Woken) -> dict[str, Any]:
    return {
        "seed": seed,
        "pauses": pauses,
        "refused": dict(sorted(woken.refused.items())),
        "accepted": dict(sorted(woken.accepted.items())),
        "wrong": woken.wrong,
    }
