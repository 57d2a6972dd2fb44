"""The SDK for asyncio: the same surface as `Broker`, awaited."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import httpx

from gpubroker.cluster.fleet import Gpu, Node, Stats, Tenant
from gpubroker.cluster.plan import FleetPlan
from gpubroker.cluster.policy import Policy
from gpubroker.cluster.quarantine import Detection, Quarantined, Released
from gpubroker.leases.holding import AsyncHeldLease
from gpubroker.leases.lease import AnyLease, Lease, LeaseOptions
from gpubroker.leases.operations import LeaseOperations
from gpubroker.models.objects import AnyObject, ObjectUsage, StoredObject
from gpubroker.models.queued import InferLaterOptions, Inputs
from gpubroker.models.requests import InferOptions, triton_healthy
from gpubroker.models.served import ServedModel
from gpubroker.operations import (
    EVENTS_PER_PAGE,
    FOLLOW_PAUSE_SECONDS,
    AnyTask,
    ChangeOptions,
    ListOptions,
    Operations,
)
from gpubroker.tasks.batch import Answered, Wanted
from gpubroker.tasks.estimates import Estimate
from gpubroker.tasks.explanation import Explanation, Simulation
from gpubroker.tasks.submission import SubmitOptions, Target
from gpubroker.tasks.task import Event, Outcome, Page, Task, Token
from gpubroker.transport.connection import Connection, find_service
from gpubroker.transport.wire import AsyncWire

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


class AsyncBroker:
    """`Broker` for asyncio: same arguments, same methods, same exceptions. Close it, or use `async with`.

    `list`, `events`, `leases` and `objects` are asynchronous iterators; everything else is awaited.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_seconds: float = 30.0,
        retry_seconds: float = 30.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.connection: Connection = find_service(url, token)
        self._do = Operations(retry_seconds)
        self._leases = LeaseOperations(retry_seconds)
        self._wire = AsyncWire(self.connection, timeout_seconds, transport)
        self._carry_out = self._wire.carry_out

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._wire.close()

    async def submit(self, target: Target, *args: Any, **options: Unpack[SubmitOptions]) -> Task:
        return await self._carry_out(self._do.submit(target, args, options))

    async def infer_later(self, model: str, inputs: Inputs, **options: Unpack[InferLaterOptions]) -> Task:
        return await self._carry_out(self._do.infer_later(model, inputs, options))

    async def upload(self, data: "bytes | ArrayLike") -> StoredObject:
        return await self._carry_out(self._do.upload(data))

    def objects(self) -> AsyncIterator[StoredObject]:
        return self._wire.items(self._do.objects_page)

    async def object_usage(self) -> ObjectUsage:
        return await self._carry_out(self._do.object_usage())

    async def delete_object(self, stored: AnyObject) -> None:
        await self._carry_out(self._do.delete_object(stored))

    async def submit_many(
        self,
        tasks: Iterable[Wanted],
        *,
        all_or_nothing: bool = False,
        idempotency_key: str | None = None,
    ) -> Sequence[Answered]:
        steps = self._do.submit_many(tasks, all_or_nothing=all_or_nothing, key=idempotency_key)
        return await self._carry_out(steps)

    async def simulate(
        self, target: Target | None = None, *args: Any, **options: Unpack[SubmitOptions]
    ) -> Simulation:
        """What would become of this task if it were submitted now; nothing is. Without a target, of a bare
        demand. A refusal is part of the answer; raises Refused for what the token may not ask."""
        return await self._carry_out(self._do.simulate(target, args, options))

    async def get(self, task: AnyTask) -> Task:
        return await self._carry_out(self._do.get(task))

    async def wait(self, task: AnyTask, timeout_seconds: float | None = None) -> Task:
        return await self._carry_out(self._do.wait(task, timeout_seconds))

    async def result(self, task: AnyTask, timeout_seconds: float | None = None) -> Any:
        return await self._carry_out(self._do.result(task, timeout_seconds))

    async def outcome(self, task: AnyTask) -> Outcome:
        return await self._carry_out(self._do.outcome(task))

    async def cancel(
        self, task: AnyTask, *, grace_seconds: float | None = None, reason: str | None = None
    ) -> Task:
        return await self._carry_out(self._do.cancel(task, grace_seconds, reason))

    async def change(self, task: AnyTask, **wanted: Unpack[ChangeOptions]) -> Task:
        return await self._carry_out(self._do.change(task, wanted))

    def list(self, **wanted: Unpack[ListOptions]) -> AsyncIterator[Task]:
        return self._wire.items(lambda cursor: self._do.page(cursor, wanted))

    async def explain(self, task: AnyTask) -> Explanation:
        return await self._carry_out(self._do.explain(task))

    async def events(
        self, task: AnyTask | None = None, *, after: int = 0, follow: bool = False
    ) -> AsyncIterator[Event]:
        while True:
            page = await self._carry_out(self._do.events(task, after, EVENTS_PER_PAGE))
            for item in page.items:
                yield item
            after = page.raw["next_after"]
            if page.items:
                continue
            if not follow:
                return
            await asyncio.sleep(FOLLOW_PAUSE_SECONDS)

    async def estimates(self, subject: str | None = None) -> Page[Estimate]:
        return await self._carry_out(self._do.estimates(subject))

    # Leases of what the broker does not start

    def lease(
        self, *, timeout_seconds: float | None = None, **options: Unpack[LeaseOptions]
    ) -> AsyncHeldLease:
        """`async with broker.lease(...) as lease:`"""
        return AsyncHeldLease(self._leases, self._carry_out, options, timeout_seconds)

    async def ask_lease(self, **options: Unpack[LeaseOptions]) -> Lease:
        """Ask and do not wait. Renew it, also while it waits, and release it in the end."""
        return await self._carry_out(self._leases.ask(options))

    async def get_lease(self, lease: AnyLease) -> Lease:
        return await self._carry_out(self._leases.get(lease))

    def leases(self, *, state: str | None = None, holder: str | None = None) -> AsyncIterator[Lease]:
        """All leases that match, newest first; `state` may be several, separated by commas."""
        return self._wire.items(lambda cursor: self._leases.page(cursor, state, holder))

    async def renew_lease(self, lease: AnyLease, ttl_seconds: float | None = None) -> Lease:
        """Raises Refused (`lease-under-notice`, `lease-ended`) where it is too late."""
        return await self._carry_out(self._leases.renew(lease, ttl_seconds))

    async def release_lease(self, lease: AnyLease) -> Lease:
        """Say that its memory is free, or that it is no longer wanted."""
        return await self._carry_out(self._leases.release(lease))

    async def gpus(self) -> Page[Gpu]:
        return await self._carry_out(self._do.gpus())

    async def nodes(self) -> Page[Node]:
        return await self._carry_out(self._do.nodes())

    async def quarantine(self) -> Page[Quarantined]:
        """What counts as used because nobody can confirm that it is gone; longest first."""
        return await self._carry_out(self._do.quarantine())

    async def release_quarantine(
        self,
        holder: AnyTask,
        reason: str,
        *,
        attempts: Sequence[int] = (),
        ranks: Sequence[int] = (),
        devices: Sequence[str] = (),
    ) -> Released:
        """State that what holds this memory is gone, or only these attempts, ranks and UUIDs of it. Nobody
        checks it; the token's name and the reason are noted. Raises Refused (`nothing-quarantined`,
        `still-in-use`)."""
        return await self._carry_out(self._do.release_quarantine(holder, reason, attempts, ranks, devices))

    async def resume(self, reason: str) -> Detection:
        """State that the nodes which fell silent at once are lost. Raises Refused (`nothing-paused`)."""
        return await self._carry_out(self._do.resume(reason))

    async def infer(
        self, model: str, inputs: "Mapping[str, ArrayLike]", **options: Unpack[InferOptions]
    ) -> "dict[str, NDArray[Any]]":
        return await self._carry_out(self._do.infer(model, inputs, options))

    async def triton_healthy(self) -> bool:
        return await self._carry_out(triton_healthy())

    async def models(self) -> Page[ServedModel]:
        """Of the servers whose memory is in the ledger: in memory, waiting for it, or neither."""
        return await self._carry_out(self._do.models())

    async def model(self, name: str, *, server: str | None = None) -> ServedModel:
        """`server`: here and below, which one is meant where several have it."""
        return await self._carry_out(self._do.model(name, server))

    async def load_model(
        self,
        name: str,
        *,
        priority: int | str | None = None,
        wait_seconds: float = 0.0,
        server: str | None = None,
    ) -> ServedModel:
        """Have it brought into memory, and wait so long for it."""
        body = {"wait_seconds": wait_seconds, **({} if priority is None else {"priority": priority})}
        return await self._carry_out(self._do.change_model(name, "load", body, server))

    async def unload_model(self, name: str, *, server: str | None = None) -> ServedModel:
        """Have it answer what it has, and leave."""
        return await self._carry_out(self._do.change_model(name, "unload", None, server))

    async def pin_model(self, name: str, *, pinned: bool = True, server: str | None = None) -> ServedModel:
        """Keep it in memory whoever asks for its room, or no longer."""
        return await self._carry_out(self._do.change_model(name, "pin", {"pinned": pinned}, server))

    async def tenants(self) -> Page[Tenant]:
        return await self._carry_out(self._do.tenants())

    async def stats(self) -> Stats:
        return await self._carry_out(self._do.stats())

    async def policy(self) -> Policy:
        return await self._carry_out(self._do.policy())

    async def ready(self) -> Mapping[str, str]:
        return await self._carry_out(self._do.ready())

    async def plan(
        self,
        components: Sequence[Mapping[str, Any]],
        fleet: Sequence[Mapping[str, Any]] | None = None,
        *,
        tenant: str | None = None,
    ) -> FleetPlan:
        """Whether these components fit the fleet that is there, or this one; nothing is stored. Both are as
        in `POST /plan`: `[{"name": "trainer", "count": 4, "resources": {"gpus": 1}}]`. `tenant`: by whose
        quota and limits; left out: the token's, or nobody's on a fleet that is described."""
        return await self._carry_out(self._do.plan(components, fleet, tenant))

    async def tokens(self) -> tuple[Token, ...]:
        return await self._carry_out(self._do.tokens())

    async def create_token(
        self,
        name: str,
        *,
        scopes: Sequence[str],
        tenant: str | None = None,
        max_priority: int | None = None,
        expires_in_seconds: float | None = None,
    ) -> Token:
        return await self._carry_out(
            self._do.create_token(
                name,
                scopes=scopes,
                tenant=tenant,
                max_priority=max_priority,
                expires_in_seconds=expires_in_seconds,
            )
        )

    async def revoke_token(self, name: str) -> None:
        await self._carry_out(self._do.revoke_token(name))

    async def shutdown(self, *, stop_cluster: bool = False) -> None:
        await self._carry_out(self._do.shutdown(stop_cluster))
