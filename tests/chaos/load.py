"""A client that lets nothing go: what it was told it writes down, and what it was not told it asks again."""

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

from tests.chaos.jobs import note

LINES = 8
_PAUSE_SECONDS = 0.05
_ANSWER_SECONDS = 10.0
_ASKED_AGAIN = 0.05
"""Of the tasks that were accepted, so many are sent once more under their key."""


class Load:
    """Submits tasks under idempotency keys until so many are accepted; dead servers do not end it."""

    def __init__(
        self, homes: Sequence[Path], told: Path, kind: "Kind", seed: str, every_seconds: float = 0.0
    ) -> None:
        """`homes`: data directories of those who take tasks in. `every_seconds`: in which each of the lines
        sends one task; by default, one after the other."""
        self._every_seconds = every_seconds
        self._homes, self._told, self._kind = homes, told, kind
        self._chance = Random(seed)
        self._seed = seed
        self._number = 0
        self._unanswered: deque[tuple[str, dict[str, Any]]] = deque()
        self._answers: dict[str, str] = {}
        """Key -> the id that was told."""
        self.accepted = 0
        self._silent: set[str] = set()
        self._all_answered = asyncio.Event()
        self._moment = 0
        self._has_come = asyncio.Event()
        self.contradictions: list[str] = []
        """Keys that were answered with two ids."""

    async def submit(self, count: int) -> None:
        """Until so many more are accepted."""
        until = self.accepted + count
        async with httpx.AsyncClient(timeout=_ANSWER_SECONDS, verify=False) as client:
            await asyncio.gather(*(self._keep_on(client, until) for _ in range(LINES)))

    async def reaches(self, count: int) -> None:
        """Back when so many are accepted."""
        self._moment = count
        self._has_come.clear()
        if self.accepted < count:
            await self._has_come.wait()

    async def is_answered_by_all(self) -> None:
        """Back when each of those who take tasks in has accepted one more."""
        self._silent = {home.name for home in self._homes}
        self._all_answered.clear()
        await self._all_answered.wait()

    async def _keep_on(self, client: httpx.AsyncClient, until: int) -> None:
        while self.accepted < until:
            began = time.monotonic()
            key, body = self._unanswered.popleft() if self._unanswered else self._next()
            try:
                await self._send(client, key, body)
            except (httpx.HTTPError, OSError, KeyError, ValueError):
                self._unanswered.append((key, body))
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                await asyncio.sleep(max(0.0, began + self._every_seconds - time.monotonic()))

    async def _send(self, client: httpx.AsyncClient, key: str, body: dict[str, Any]) -> None:
        """Raises when nobody says that it is accepted."""
        home = self._chance.choice(self._homes)
        id, is_replay = await self._ask(client, home, key, body)
        note(str(self._told), key=key, id=id, replayed=is_replay, home=home.name)
        self._silent.discard(home.name)
        if not self._silent:
            self._all_answered.set()
        before = self._answers.setdefault(key, id)
        if before != id:
            self.contradictions.append(f"{key} is {before} and {id}")
        if len(self._answers) == self.accepted:
            return  # an answer once more
        self.accepted = len(self._answers)
        if self.accepted >= self._moment:
            self._has_come.set()
        if self._chance.random() < _ASKED_AGAIN:
            self._unanswered.append((key, body))
        if self._chance.random() < self._kind.cancelled:
            with suppress(httpx.HTTPError):
                await self._cancel(client, home, id)

    async def _ask(
        self, client: httpx.AsyncClient, home: Path, key: str, body: dict[str, Any]
    ) -> tuple[str, bool]:
        """The id, and whether the answer is one that was given before."""
        url, headers = _known(home)
        answer = await client.post(f"{url}/tasks", json=body, headers={**headers, "Idempotency-Key": key})
        answer.raise_for_status()
        return answer.json()["id"], "Idempotency-Replayed" in answer.headers

    async def _cancel(self, client: httpx.AsyncClient, home: Path, id: str) -> None:
        url, headers = _known(home)
        await client.post(f"{url}/tasks/{id}/cancel", json={}, headers=headers)

    def _next(self) -> tuple[str, dict[str, Any]]:
        self._number += 1
        return f"{self._seed}-{self._number}", self._kind.body(self._chance)


def _known(home: Path) -> tuple[str, dict[str, str]]:
    known = json.loads((home / "client.json").read_text())
    return known["url"], {"Authorization": f"Bearer {known['token']}"}


class Kind:
    """What is submitted."""

    cancelled = 0.03

    def body(self, chance: Random) -> dict[str, Any]:
        raise NotImplementedError


class Waits(Kind):
    """For the engine that only waits: all sizes and priorities, so that much is stopped for others."""

    def body(self, chance: Random) -> dict[str, Any]:
        return {
            "run": {"entrypoint": "tests.chaos.jobs:work", "kwargs": {"seconds": chance.expovariate(40.0)}},
            "resources": {"gpu_mb": chance.choice([1000, 2000, 6000, 12_000, 20_000])},
            "priority": chance.choice([10, 50, 50, 50, 80]),
            "max_retries": 20,
            "grace_seconds": 1,
        }


class Works(Kind):
    """For real processes: most share one, some have a part of a GPU to themselves."""

    def __init__(self, witness: Path) -> None:
        self._witness = str(witness)

    def body(self, chance: Random) -> dict[str, Any]:
        seconds = chance.expovariate(10.0)
        kwargs: dict[str, Any] = {"witness": self._witness, "seconds": seconds}
        resources: dict[str, Any] = {"cpu": 0.05}
        if chance.random() < 0.15:
            mb = chance.choice([4000, 9000, 14_000])
            kwargs |= {"gpu_mb": mb, "seconds": 1 + 5 * seconds}  # long enough to be met
            resources = {"gpu_mb": mb, "cpu": 0}
        return {
            "run": {"entrypoint": "tests.chaos.jobs:work", "kwargs": kwargs},
            "resources": resources,
            "priority": chance.choice([10, 50, 80]),
            "max_retries": 20,
            "grace_seconds": 2,
        }
