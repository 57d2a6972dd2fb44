"""What a store keeps beside tasks, and secrets, in memory."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace

from gpubroker_server.core.domain.decisions import AuditNote, Decision, ItemPage, QueuePause, StreamState
from gpubroker_server.core.domain.leader_term import LeaderRow, next_lineage
from gpubroker_server.core.domain.orders import ItemRange, LogName
from gpubroker_server.core.domain.submission import WorkerSet
from gpubroker_server.core.domain.units import Instant, Lineage, Seconds, TaskId, Term
from gpubroker_server.ports.arrays import ItemCounts, PageFilter
from gpubroker_server.ports.idle_templates import IdleTemplate
from gpubroker_server.ports.objects import Counted, ObjectOrder, Quota, SortKey, StoredObject
from gpubroker_server.ports.run_logs import FollowedLogs, LogChanges, LogPart
from gpubroker_server.ports.store import StaleTerm, TokenRow


class LeaderInMemory:
    """The leader's row."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._term = Term(0)
        self._leader = ""
        self._lease_until = Instant(0.0)
        self._lineage = Lineage(0)

    async def leader(self) -> LeaderRow:
        return LeaderRow(self._term, self._leader, self._lease_until, Instant(self._now()), self._lineage)

    async def take_term(
        self, holder: str, ttl_seconds: Seconds, *, instead_of: LeaderRow, has_lost_commits: bool = False
    ) -> Term | None:
        if (instead_of.term, instead_of.lease_until) != (self._term, self._lease_until):
            return None
        if has_lost_commits:
            self._lineage = next_lineage(self._lineage, Instant(self._now()))
        self._term = Term(self._term + 1)
        self._leader = holder
        self._lease_until = Instant(self._now() + ttl_seconds)
        return self._term

    async def renew(self, term: Term, ttl_seconds: Seconds) -> None:
        self._require(term)
        self._lease_until = Instant(self._now() + ttl_seconds)

    async def resign(self, term: Term) -> None:
        if term == self._term:
            self._lease_until = Instant(0.0)

    async def database_time(self) -> Instant:
        return Instant(self._now())

    async def held_back(self) -> None:
        return None

    def _require(self, term: Term) -> None:
        if term != self._term:
            raise StaleTerm(f"term {term} is over: {self._leader} leads term {self._term}; stop leading")


class RunLogsInMemory(LeaderInMemory):
    """The output of runs."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(now)
        self._followed: dict[str, FollowedLogs] = {}
        self._logs: dict[LogName, dict[int, LogPart]] = {}
        """By first byte."""

    async def follow_logs(self, followed: FollowedLogs) -> None:
        self._followed[followed.gateway] = followed

    async def followed_logs(self) -> Sequence[FollowedLogs]:
        return list(self._followed.values())

    async def keep_logs(self, term: Term, changes: LogChanges) -> None:
        self._require(term)
        for log in changes.replaced:
            self._logs.pop(log, None)
        for part in changes.parts:
            self._logs.setdefault(part.log, {})[part.first_byte] = part
        for log, (begin, end) in (changes.cut or {}).items():
            parts = self._logs.get(log, {})
            for at in [at for at, part in parts.items() if at >= begin and part.end_byte <= end]:
                del parts[at]

    async def log_parts(self, log: LogName, after_byte: int, limit: int) -> Sequence[LogPart]:
        parts = [part for part in self._logs.get(log, {}).values() if part.end_byte > after_byte]
        return sorted(parts, key=lambda part: part.first_byte)[:limit]

    async def log_end(self, log: LogName) -> tuple[int, Instant | None]:
        parts = self._logs.get(log, {}).values()
        if not parts:
            return 0, None
        return max(part.end_byte for part in parts), max(part.at for part in parts)

    def drop_logs_of(self, task: TaskId) -> None:
        for log in [log for log in self._logs if log.task == task]:
            del self._logs[log]

    def logged(self) -> Set[str]:
        """Digests of all objects."""
        parts = (part for log in self._logs.values() for part in log.values())
        return {part.digest for part in parts if part.digest is not None}


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


class PagesInMemory:
    """Results of the items of arrays."""

    def __init__(self) -> None:
        self._pages: dict[tuple[TaskId, int], ItemPage] = {}

    def has_pages(self, given: Iterable[ItemPage]) -> bool:
        """Whether one of them is stored already."""
        return any((page.array, page.first) in self._pages for page in given)

    def keep_pages(self, given: Iterable[ItemPage]) -> None:
        self._pages |= {(page.array, page.first): page for page in given}

    def drop_pages(self, arrays: Set[TaskId]) -> None:
        self._pages = {key: page for key, page in self._pages.items() if page.array not in arrays}

    def digests_of_pages(self) -> Set[str | None]:
        return {page.digest for page in self._pages.values()}

    async def item_counts(self, array: TaskId) -> ItemCounts:
        pages = self._of(array)
        if not pages:
            return ItemCounts()
        done, failed = sum(page.count for page in pages), sum(page.failed for page in pages)
        times = [page.at for page in pages]
        size_bytes = sum(page.size_bytes for page in pages)
        return ItemCounts(done, failed, max(page.page for page in pages), min(times), max(times), size_bytes)

    async def items_done(self, array: TaskId) -> Sequence[ItemRange]:
        return [(page.first, page.first + page.count) for page in self._of(array)]

    async def item_pages(self, wanted: PageFilter) -> Sequence[ItemPage]:
        chosen = [page for page in self._of(wanted.array) if _matches(page, wanted)]
        chosen.sort(key=lambda page: page.page if wanted.by_commit else page.first)
        return chosen[: wanted.limit]

    def _of(self, array: TaskId) -> list[ItemPage]:
        return [page for page in self._pages.values() if page.array == array]


def _matches(page: ItemPage, wanted: PageFilter) -> bool:
    is_later = page.page > wanted.after if wanted.by_commit else page.first + page.count > wanted.after + 1
    has_it = page.failed > 0 if wanted.failed else page.failed < page.count
    return is_later and (wanted.failed is None or has_it)
