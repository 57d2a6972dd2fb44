"""Explain and simulate requests to the real gateway app over a World in this process, JSON included.

The client's CPU time counts too. The network and the database's look-up of one row are left out.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import process_time
from typing import Any, cast

import httpx
from gpubroker_server.adapters.secret_files import SecretFiles
from gpubroker_server.core.admission.permissions import Permissions
from gpubroker_server.core.control.fleet import FleetSeen
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.limits import ServiceLimits
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.progress import Progress
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Position, TaskId
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.app import create_app
from gpubroker_server.gateway.parts import AppParts, OperatorRules
from gpubroker_server.gateway.submission.translation import CLOUDPICKLE, PYTHON
from gpubroker_server.http.identity import EVERY_SCOPE, Tokens, new_token
from gpubroker_server.http.waiters import Waiters
from gpubroker_server.ports.last_values import LeaderSeen
from gpubroker_server.ports.store import (
    BlobMissing,
    RunSpec,
    TaskRecord,
    TaskStore,
    TokenRow,
)
from msgspec import Struct, field

NOTHING = httpx.ByteStream(b"")


class Answers(Struct, frozen=True):
    seconds: list[float]
    """The CPU time of each request, in seconds."""
    bytes: list[int]


class FrozenClock(Struct, frozen=True):
    """A clock that always says the same time."""

    at: Instant

    def now(self) -> Instant:
        return self.at


class WorldStore:
    """The part of TaskStore that the requests need. The records of tasks are those of a World."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.rows: list[TokenRow] = []

    async def head(self) -> Position:
        """Return the position of the World, which has read the whole log."""
        return self._world.position

    async def tokens(self) -> Sequence[TokenRow]:
        return self.rows

    async def record(self, task: TaskId) -> TaskRecord | None:
        row = self._world.tasks.get(task)
        return None if row is None else TaskRecord(row, RunSpec("entrypoint", "bench:task"))


class NoBlobs:
    async def put(self, data: bytes, *, owner: str) -> str:
        raise NotImplementedError

    async def get(self, digest: str) -> bytes:
        raise BlobMissing(digest)

    async def read(self, digest: str, first_byte: int, most_bytes: int) -> bytes:
        raise NotImplementedError

    async def append(self, upload: str, first_byte: int, data: bytes) -> int:
        raise NotImplementedError

    async def finish(self, upload: str, digest: str, *, was_computed: bool = False) -> None:
        raise NotImplementedError

    async def discard(self, upload: str) -> None:
        raise NotImplementedError

    async def delete(self, digest: str) -> None:
        raise NotImplementedError


class FollowedWorld(Struct, frozen=True):
    world: World
    clock: FrozenClock
    progress: Mapping[TaskId, Progress] = field(default_factory=dict)
    is_clock_contradicted: bool = False

    def age_seconds(self) -> float:
        return 0.0

    def why_stale(self) -> str:
        return ""


class KnownLeader(Struct, frozen=True):
    forecasts_now: Sequence[Forecast]

    def leader(self) -> LeaderSeen | None:
        return None

    def last_fleet(self) -> FleetSeen | None:
        return None

    def executor_status(self) -> Mapping[str, Any]:
        return {}

    def paused(self) -> PausedDetection | None:
        return None

    def forecasts(self) -> Sequence[Forecast]:
        return self.forecasts_now


class Gateway(Struct, frozen=True):
    """The gateway app and the parts from which it answers."""

    world: World
    policy: Policy
    now: Instant
    forecasts: Sequence[Forecast]
    before_each: Callable[[], None]
    """The function that is called before each request."""

    def explained(self, tasks: Iterable[Task]) -> Answers:
        requests = [(task, "GET", f"/tasks/{task.id}/explain", None) for task in tasks]
        return asyncio.run(self._ask(requests))

    def simulated(self, tasks: Iterable[Task]) -> Answers:
        """Ask what would become of another task like each of these."""
        requests = [(task, "POST", "/tasks/simulate", _body(task)) for task in tasks]
        return asyncio.run(self._ask(requests))

    async def _ask(self, requests: Sequence[tuple[Task, str, str, Any]]) -> Answers:
        """Send one request after the other, each with a token of the task's tenant."""
        clock, store = FrozenClock(self.now), WorldStore(self.world)
        tokens = Tokens(cast(TaskStore, store), clock)
        parts = AppParts(
            store=cast(TaskStore, store),
            blobs=NoBlobs(),
            secrets=SecretFiles(Path("no request names a secret")),
            follower=FollowedWorld(self.world, clock),
            leadership=KnownLeader(self.forecasts),
            tokens=tokens,
            rules=OperatorRules(permissions=Permissions(self.policy, ("bench:*",), PYTHON, CLOUDPICKLE)),
            waiters=Waiters(ServiceLimits().tenant_waits),
            shutdown=lambda _stop: None,
        )
        app = create_app(parts)
        secrets = {}
        for tenant in sorted({task.tenant for task, *_ in requests}):
            secrets[tenant], row = new_token(
                tenant, tenant=tenant, scopes=[EVERY_SCOPE], max_priority=100, now=self.now
            )
            store.rows.append(row)
        await tokens.load()
        answers = Answers([], [])
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for task, method, path, body in requests:
                self.before_each()
                headers = {"Authorization": f"Bearer {secrets[task.tenant]}"}
                began = process_time()
                answer = await client.request(method, path, json=body, headers=headers)
                answers.seconds.append(process_time() - began)
                answers.bytes.append(len(answer.content))
                answer.stream = NOTHING  # a reference cycle would keep both until the next full collection
                if answer.status_code != 200:
                    raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text}")
        return answers


def _body(task: Task) -> dict[str, Any]:
    return {"priority": task.priority, "resources": _resources(task.demand)}


def _resources(demand: Demand) -> dict[str, Any]:
    fields = {
        "gpus": demand.gpus or None,
        "gpu_mb": demand.gpu_mb,
        "gpu_fraction": demand.gpu_fraction,
        "cpu": demand.cpu,
        "memory_mb": demand.memory_mb,
    }
    return {name: value for name, value in fields.items() if value is not None}
