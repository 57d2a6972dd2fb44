"""Batches of tasks that are stored once, however often their client sends them."""

from dataclasses import dataclass, replace

from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.gateway.http.routing import Call
from gpubroker_server.gateway.submission.submissions import body_hash, key_reused
from gpubroker_server.ports.store import BatchSubmission, SubmitVerdict, TaskStore


@dataclass(frozen=True, slots=True)
class SentBatch:
    """What a request for a batch is told by. A batch is known by its first task."""

    rows: TaskStore
    tenant: str
    what: str
    """Such as `array`, for messages."""
    key: str | None
    """None: the client does not ask to be told from another."""
    body_hash: str

    async def stored_before(self) -> TaskId | None:
        """The batch that an earlier request with this key and body stored; it is answered again even if a new
        one would be refused by now. Raises Problem idempotency-key-reused for another body."""
        known = None if self.key is None else await self.rows.known_key(self.tenant, self.key)
        if known is not None and known.body_hash != self.body_hash:
            raise key_reused(str(self.key), known.task, self.what)
        return None if known is None else known.task

    async def store(self, batch: BatchSubmission) -> TaskId | None:
        """None: all of it is durable. Otherwise it was sent twice at once, and the other one is stored.

        Raises Problem idempotency-key-reused.
        """
        batch = replace(batch, idempotency_key=self.key, body_hash=self.body_hash)
        outcome = await self.rows.submit_batch(batch)
        if outcome.verdict is SubmitVerdict.KEY_REUSED:
            raise key_reused(str(self.key), outcome.task, self.what)
        return outcome.task if outcome.verdict is SubmitVerdict.DUPLICATE else None


async def sent_batch(call: Call, rows: TaskStore, key: str | None, what: str, purpose: str = "") -> SentBatch:
    """`purpose`: the same key and body mean different requests for each. Default: `what`."""
    if key is None:
        return SentBatch(rows, call.identity.tenant, what, None, "")
    hashed = await body_hash(call, purpose or what)
    return SentBatch(rows, call.identity.tenant, what, key.strip('"'), hashed)
