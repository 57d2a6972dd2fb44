"""Clients that record every answer, and send again every request without an answer."""

import asyncio
import json
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx

from tests.chaos.jobs import append_line

CLIENTS = 8
_RETRY_SECONDS = 0.05
_TIMEOUT_SECONDS = 10.0
_SENT_AGAIN = 0.05
"""The share of accepted tasks that are sent once more under their key."""


class Load:
    """Submits tasks under idempotency keys until a number is accepted and none is left without an answer.

    Servers may be down meanwhile.
    """

    def __init__(
        self,
        data_dirs: Sequence[Path],
        answers: Path,
        kind: "Kind",
        seed: str,
        every_seconds: float = 0.0,
    ) -> None:
        """`data_dirs`: those of the gateways. `answers`: the file to record answers in. `every_seconds`: each
        client sends one task in this time; 0: one after the other."""
        self._every_seconds = every_seconds
        self._data_dirs, self._file, self._kind = data_dirs, answers, kind
        self._chance = Random(seed)
        self._seed = seed
        self._number = 0
        self._unanswered: deque[tuple[str, dict[str, Any]]] = deque()
        self._answers: dict[str, str] = {}
        """Idempotency key -> id of the task."""
        self.accepted = 0
        self._silent: set[str] = set()
        self._all_answered = asyncio.Event()
        self._target = 0
        self._target_reached = asyncio.Event()
        self._first_sent: dict[str, float] = {}
        """By key, on the monotonic clock; none once it is answered."""
        self._silent_for: dict[str, Path] = {}
        """By key: which gateway gave no answer."""
        self.slowest_seconds = 0.0
        """The longest time until a task was accepted, from when it was first sent."""
        self.contradictions: list[str] = []
        """Keys that were answered with two ids."""

    async def submit(self, count: int) -> None:
        """Until `count` more tasks are accepted."""
        until = self.accepted + count
        async with httpx.AsyncClient(timeout=_TIMEOUT_SECONDS, verify=False) as client:
            await asyncio.gather(*(self._submit_until(client, until) for _ in range(CLIENTS)))

    async def reaches(self, count: int) -> None:
        """Wait until `count` tasks are accepted."""
        self._target = count
        self._target_reached.clear()
        if self.accepted < count:
            await self._target_reached.wait()

    async def is_answered_by_all(self) -> None:
        """Wait until every gateway has accepted one more task."""
        self._silent = {data_dir.name for data_dir in self._data_dirs}
        self._all_answered.clear()
        await self._all_answered.wait()

    async def _submit_until(self, client: httpx.AsyncClient, until: int) -> None:
        while self.accepted < until or self._unanswered:
            began = time.monotonic()
            key, body = self._unanswered.popleft() if self._unanswered else self._next()
            first = self._first_sent.setdefault(key, began)
            data_dir = self._gateway_for(key)
            try:
                await self._send(client, data_dir, key, body)
            except (httpx.HTTPError, OSError, KeyError, ValueError):
                self._silent_for[key] = data_dir
                self._unanswered.append((key, body))
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - first)
                self._first_sent.pop(key, None)
                self._silent_for.pop(key, None)
                await asyncio.sleep(max(0.0, began + self._every_seconds - time.monotonic()))

    def _gateway_for(self, key: str) -> Path:
        """Another one than that which did not answer last time, if there is one."""
        others = [one for one in self._data_dirs if one != self._silent_for.get(key)]
        return self._chance.choice(others or self._data_dirs)

    async def _send(self, client: httpx.AsyncClient, data_dir: Path, key: str, body: dict[str, Any]) -> None:
        """Raises unless the answer is that the task is accepted."""
        id, is_replay = await self._post(client, data_dir, key, body)
        append_line(str(self._file), key=key, id=id, replayed=is_replay, home=data_dir.name)
        self._silent.discard(data_dir.name)
        if not self._silent:
            self._all_answered.set()
        before = self._answers.setdefault(key, id)
        if before != id:
            self.contradictions.append(f"{key} was answered with {before} and {id}")
        if len(self._answers) == self.accepted:
            return  # a repeated answer
        self.accepted = len(self._answers)
        if self.accepted >= self._target:
            self._target_reached.set()
        if self._chance.random() < _SENT_AGAIN:
            self._unanswered.append((key, body))
        if self._chance.random() < self._kind.cancelled:
            with suppress(httpx.HTTPError):
                await self._cancel(client, data_dir, id)

    async def _post(
        self, client: httpx.AsyncClient, data_dir: Path, key: str, body: dict[str, Any]
    ) -> tuple[str, bool]:
        """(id of the task, whether the answer is a replay)"""
        url, headers = _client_file(data_dir)
        answer = await client.post(f"{url}/tasks", json=body, headers={**headers, "Idempotency-Key": key})
        answer.raise_for_status()
        return answer.json()["id"], "Idempotency-Replayed" in answer.headers

    async def _cancel(self, client: httpx.AsyncClient, data_dir: Path, id: str) -> None:
        url, headers = _client_file(data_dir)
        await client.post(f"{url}/tasks/{id}/cancel", json={}, headers=headers)

    def _next(self) -> tuple[str, dict[str, Any]]:
        self._number += 1
        return f"{self._seed}-{self._number}", self._kind.body(self._chance)


def _client_file(data_dir: Path) -> tuple[str, dict[str, str]]:
    """(URL, headers) from the file that a gateway writes for clients on its machine."""
    known = json.loads((data_dir / "client.json").read_text())
    return known["url"], {"Authorization": f"Bearer {known['token']}"}


class Kind:
    """The tasks that are submitted."""

    cancelled = 0.03
    """The share of tasks that are cancelled right after their submit."""

    def body(self, chance: Random) -> dict[str, Any]:
        raise NotImplementedError


class SimulatedTasks(Kind):
    """For the simulated engine: all sizes and priorities, so that many preempt others."""

    def body(self, chance: Random) -> dict[str, Any]:
        return {
            "run": {"entrypoint": "tests.chaos.jobs:work", "kwargs": {"seconds": chance.expovariate(40.0)}},
            "resources": {"gpu_mb": chance.choice([1000, 2000, 6000, 12_000, 20_000])},
            "priority": chance.choice([10, 50, 50, 50, 80]),
            "max_retries": 20,
            "grace_seconds": 1,
        }


class RealTasks(Kind):
    """For real processes: most share one, some have a part of a GPU."""

    def __init__(self, witness: Path) -> None:
        self._witness = str(witness)

    def body(self, chance: Random) -> dict[str, Any]:
        seconds = chance.expovariate(10.0)
        kwargs: dict[str, Any] = {"witness": self._witness, "seconds": seconds}
        resources: dict[str, Any] = {"cpu": 0.05}
        if chance.random() < 0.15:
            mb = chance.choice([4000, 9000, 14_000])
            kwargs |= {"gpu_mb": mb, "seconds": 1 + 5 * seconds}  # long enough to be hit by a kill
            resources = {"gpu_mb": mb, "cpu": 0}
        return {
            "run": {"entrypoint": "tests.chaos.jobs:work", "kwargs": kwargs},
            "resources": resources,
            "priority": chance.choice([10, 50, 80]),
            "max_retries": 20,
            "grace_seconds": 2,
        }
