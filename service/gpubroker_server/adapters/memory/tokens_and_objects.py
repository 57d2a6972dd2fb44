"""What a store and secrets keep beside tasks, in memory."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace

from gpubroker_server.adapters.memory.run_logs import RunLogsInMemory
from gpubroker_server.core.domain.decisions import AuditNote, Decision, QueuePause, StreamState
from gpubroker_server.core.domain.submission import WorkerSet
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.ports.idle_templates import IdleTemplate
from gpubroker_server.ports.objects import Counted, ObjectOrder, Quota, SortKey, StoredObject
from gpubroker_server.ports.store import TokenRow


class TokensAndObjects(RunLogsInMemory):
    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(now)
        self._tokens: dict[str, TokenRow] = {}
        self._templates: dict[str, IdleTemplate] = {}
        self._objects: dict[tuple[str, str], StoredObject] = {}
        self.audited: list[AuditNote] = []

    async def audit(self, *, by: str, tenant: str, action: str, subject: str) -> None:
        """Kept as long as the process, as all of this store."""
        self.audited.append(AuditNote(Instant(self._now()), tenant, by, action, subject, ""))

    async def put_token(self, token: TokenRow, *, by: str) -> bool:  # noqa: ARG002  # no audit outlives it
        return self._tokens.setdefault(token.name, token).sha256 == token.sha256

    async def tokens(self) -> Sequence[TokenRow]:
        return [self._tokens[name] for name in sorted(self._tokens)]

    async def drop_token(self, name: str, *, by: str) -> bool:  # noqa: ARG002
        return self._tokens.pop(name, None) is not None

    async def put_idle_template(self, template: IdleTemplate) -> bool:
        return self._templates.setdefault(template.name, template) is template

    async def idle_templates(self, now: Instant | None = None) -> Sequence[IdleTemplate]:
        tokens = self._tokens.values()
        lives = {one.sha256 for one in tokens if now and (one.expires_at is None or one.expires_at > now)}
        found = [self._templates[name] for name in sorted(self._templates)]
        return [one for one in found if now is None or one.token in lives]

    async def drop_idle_template(self, name: str, *, by: str) -> bool:  # noqa: ARG002
        return self._templates.pop(name, None) is not None

    async def keep_object(self, given: StoredObject, quota: Quota) -> StoredObject | None:
        of_tenant = [kept for (tenant, _), kept in self._objects.items() if tenant == given.tenant]
        self._drop_over(of_tenant, given.created_at)
        key = given.tenant, given.digest
        known = self._objects.get(key)
        others = [it for it in of_tenant if it.expires_at > given.created_at and it is not known]
        if not quota.has_room(_counted(others), given):
            return None
        if known is not None:
            given = replace(known, expires_at=max(known.expires_at, given.expires_at))
        self._objects[key] = given
        return given

    async def stored_object(self, tenant: str, digest: str) -> StoredObject | None:
        return self._objects.get((tenant, digest))

    async def stored_objects(
        self, tenant: str, now: Instant, order: ObjectOrder, *, after: SortKey = (), limit: int
    ) -> Sequence[StoredObject]:
        kept = [it for it in self._objects.values() if it.tenant == tenant and it.expires_at > now]
        key, descending = order.sort.key, order.descending
        if after:
            kept = [it for it in kept if (key(it) < after if descending else key(it) > after)]
        return sorted(kept, key=key, reverse=descending)[:limit]

    async def counted_objects(self, tenant: str, now: Instant) -> Counted:
        kept = self._objects.values()
        return _counted([it for it in kept if it.tenant == tenant and it.expires_at > now])

    async def extend_object(self, tenant: str, digest: str, until: Instant) -> None:
        known = self._objects.get((tenant, digest))
        if known is not None and known.expires_at < until:
            self._objects[tenant, digest] = replace(known, expires_at=until)

    async def drop_object(self, tenant: str, digest: str) -> bool:
        return self._objects.pop((tenant, digest), None) is not None

    def uploaded(self) -> Set[str]:
        """Digests of all objects, those of logs too."""
        return {digest for _, digest in self._objects} | self.logged()

    def prune_objects(self, now: Instant) -> bool:
        """Whether an expired object was removed."""
        return self._drop_over(list(self._objects.values()), now)

    def _drop_over(self, some: Sequence[StoredObject], now: Instant) -> bool:
        over = [kept for kept in some if kept.expires_at <= now]
        for kept in over:
            del self._objects[kept.tenant, kept.digest]
        return bool(over)


def _counted(kept: Sequence[StoredObject]) -> Counted:
    return Counted(sum(it.counted_bytes for it in kept), len(kept))


class StandingInMemory:
    """Rows that stand until they are ended: pauses of queues, worker sets and work streams."""

    def __init__(self) -> None:
        self.pauses: dict[str, QueuePause] = {}
        self.worker_sets: dict[TaskId, WorkerSet] = {}
        self.streams: dict[str, StreamState] = {}

    def keep_standing(self, decision: Decision) -> None:
        self.pauses |= {pause.queue: pause for pause in decision.paused}
        for pause in decision.resumed:
            self.pauses.pop(pause.queue, None)
        for written in decision.worker_sets:
            self.worker_sets[written.workers.id] = written.workers
            if written.what == "over":
                del self.worker_sets[written.workers.id]
        self.streams |= {stream.name: stream for stream in decision.streams}
        self.streams = {name: stream for name, stream in self.streams.items() if not stream.is_untold}


class MemorySecrets:
    def __init__(self) -> None:
        self._texts: dict[tuple[str, str], str] = {}

    async def put(self, tenant: str, name: str, text: str) -> None:
        self._texts[tenant, name] = text

    async def names(self, tenant: str) -> Sequence[str]:
        return sorted(name for owner, name in self._texts if owner == tenant)

    async def read(self, tenant: str, names: Iterable[str]) -> Mapping[str, str]:
        return {name: self._texts[tenant, name] for name in names if (tenant, name) in self._texts}

    async def drop(self, tenant: str, name: str) -> bool:
        return self._texts.pop((tenant, name), None) is not None
