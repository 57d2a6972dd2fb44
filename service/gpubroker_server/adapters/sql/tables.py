"""Tables of tasks, memory and events, for both databases. Times are seconds since 1970 by the database's
clock.

There are no foreign keys: all rows of a task are inserted in one transaction, and each write would pay for a
check and a lock on the parent.
"""

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    Table,
    Text,
    false,
    text,
)

from gpubroker_server.adapters.sql.system_tables import HOT, Count, Id, one_of, where
from gpubroker_server.adapters.sql.system_tables import metadata as metadata
from gpubroker_server.core.domain.estimates import What
from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.task import TERMINAL, TaskState

task = Table(
    "task",
    metadata,
    Column("id", Id, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("demand", Text, nullable=False),
    Column("submitted_at", Double, nullable=False),
    Column("max_retries", Integer, nullable=False),
    Column("timeout_seconds", Double),
    Column("grace_seconds", Double, nullable=False),
    Column("shareable", Boolean, nullable=False),
    Column("after", Text, nullable=False),
    Column("queue_ttl_seconds", Double),
    Column("deadline_at", Double),
    Column("expected_seconds", Double),
    Column("stream", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("external", Text),
    Column("state", Text, nullable=False, server_default=TaskState.PENDING.value),
    Column("version", Integer, nullable=False, server_default=text("1")),
    Column("fence", Integer, nullable=False, server_default=text("0")),
    Column("held", Boolean, nullable=False),
    Column("awaits", Boolean, nullable=False),
    Column("failed_by", Id),
    Column("expires_at", Double),
    Column("not_before", Double),
    Column("failures", Integer, nullable=False, server_default=text("0")),
    Column("preemptions", Integer, nullable=False, server_default=text("0")),
    Column("node", Text),
    Column("admitted_at", Double),
    Column("started_at", Double),
    Column("checkpoint_at", Double),
    Column("finished_at", Double),
    Column("stop_reason", Text),
    Column("stop_deadline_at", Double),
    Column("freeing_for", Id),
    Column("members", Text),
    Column("finished", Boolean, nullable=False, server_default=false()),
    Column("ended_as", Text),
    Column("idem_key", Text),
    Column("body_hash", Text),
    Column("model", Text),
    Column("home", Text),
    Column("queued_bytes", Count, nullable=False, server_default=text("0")),
    Column("ordered_at", Double),
    Column("array", Id),
    Column("retry_on", Text),
    Column("stop_cause", Text),
    one_of("state", TaskState),
    CheckConstraint(
        f"finished = (state IN ({', '.join(repr(state.value) for state in sorted(TERMINAL))}))",
        name="finished",
    ),
    **HOT,
)
"""The part of a task that changes. Indexes contain `ended_as` and not `state`, so that no indexed column
changes before the end and PostgreSQL keeps every update but the last on its page."""

Index("ix_task_tenant_idem_key", task.c.tenant, task.c.idem_key, unique=True, **where("idem_key IS NOT NULL"))
Index("ix_task_tenant_id", task.c.tenant, task.c.id)
Index("ix_task_unfinished", task.c.tenant, task.c.id, **where("finished = 0", "NOT finished"))
Index("ix_task_finished", task.c.tenant, task.c.ended_as, task.c.id, **where("finished = 1", "finished"))
Index("ix_task_finished_at", task.c.finished_at, **where("finished = 1", "finished"))
Index("ix_task_dependent", task.c.tenant, task.c.id, **where("after <> '[]'"))
Index(
    "ix_task_home",
    task.c.home,
    unique=True,
    **where("home IS NOT NULL AND finished = 0", "home IS NOT NULL AND NOT finished"),
)
"""This index makes sure that a model of a server has one holder at a time."""
Index("ix_task_external", task.c.tenant, task.c.id, **where("external IS NOT NULL"))

task_spec = Table(
    "task_spec",
    metadata,
    Column("task", Id, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("entrypoint", Text, nullable=False),
    Column("command", Text, nullable=False),
    Column("arguments", LargeBinary, nullable=False),
    Column("arguments_digest", Text),
    Column("python", Text, nullable=False),
    Column("env", Text, nullable=False),
    Column("result_format", Text, nullable=False),
    Column("labels", Text, nullable=False),
    Column("model_type", Text, nullable=False),
    Column("working_directory", Text, nullable=False),
    Column("sizing", Text),
    Column("objects", Text, nullable=False, server_default=text("'[]'")),
    Column("upload", Text, nullable=False, server_default=text("''")),
    Column("outputs", Text, nullable=False, server_default=text("'[]'")),
    Column("environment", Text),
)
"""The part of a task that never changes. `command`, `env`, `labels`, `sizing`, `objects`, `outputs` and
`environment` are JSON."""

Index("ix_task_spec_arguments_digest", task_spec.c.arguments_digest, **where("arguments_digest IS NOT NULL"))

task_label = Table(
    "task_label",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("value", Text, nullable=False),
    Column("task", Id, nullable=False),
    PrimaryKeyConstraint("tenant", "key", "value", "task"),
    sqlite_with_rowid=False,
)
"""The labels of `task_spec`, stored once more for searches."""

batch = Table(
    "batch",
    metadata,
    Column("task", Id, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("answer", Text, nullable=False),
)
"""The answers to batches with an idempotency key. `task` is the first task of the batch, which has the
key."""

outcome = Table(
    "outcome",
    metadata,
    Column("task", Id, nullable=False),
    Column("fence", Integer, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("ending", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("result", LargeBinary),
    Column("result_digest", Text),
    Column("result_format", Text, nullable=False),
    Column("failure", Text),
    Column("log_tail", LargeBinary, nullable=False),
    PrimaryKeyConstraint("task", "fence"),
)
"""The end of each run. The end with the highest fence is the end of the task."""

Index("ix_outcome_result_digest", outcome.c.result_digest, **where("result_digest IS NOT NULL"))

checkpoint = Table(
    "checkpoint",
    metadata,
    Column("task", Id, nullable=False),
    Column("fence", Integer, nullable=False),
    Column("sequence", Integer, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("digest", Text, nullable=False),
    Column("size_bytes", Count, nullable=False),
    Column("uri", Text),
    PrimaryKeyConstraint("task", "fence", "sequence"),
    Index("ix_checkpoint_digest", "digest"),
)
"""The newest three checkpoints of each task."""

item_page = Table(
    "item_page",
    metadata,
    Column("array", Id, nullable=False),
    Column("first", Integer, nullable=False),
    Column("page", Integer, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("count", Integer, nullable=False),
    Column("failed", Integer, nullable=False),
    Column("at", Double, nullable=False),
    Column("lines", LargeBinary, nullable=False),
    Column("digest", Text),
    Column("size_bytes", Count, nullable=False, server_default=text("0")),
    PrimaryKeyConstraint("array", "first"),
    Index("ix_item_page_counts", "array", "page", "count", "failed", "at", "size_bytes"),
    Index("ix_item_page_digest", "digest", **where("digest IS NOT NULL")),
)
"""The results of consecutive items of an array, from the item `first` on. `lines` has a line of JSON per
item."""

lease = Table(
    "lease",
    metadata,
    Column("holder_kind", Text, nullable=False),
    Column("holder", Id, nullable=False),
    Column("fence", Integer, nullable=False),
    Column("rank", Integer, nullable=False),
    Column("device", Text, nullable=False),
    Column("mb", Integer, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("since", Double, nullable=False),
    Column("state", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("context_mb", Integer, nullable=False),
    Column("released", Boolean, nullable=False, server_default=false()),
    Column("overused_mb", Integer, nullable=False),
    Column("quarantined_at", Double),
    PrimaryKeyConstraint("holder_kind", "holder", "fence", "rank", "device"),
    one_of("state", LeaseState),
    CheckConstraint("released = (state = 'released')", name="released"),
    CheckConstraint("mb >= 0", name="mb"),
    **HOT,
)

Index("ix_lease_unreleased", lease.c.holder, **where("released = 0", "NOT released"))

pledge = Table(
    "pledge",
    metadata,
    Column("preemptor", Id, nullable=False),
    Column("device", Text, nullable=False),
    Column("mb", Integer, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("made_at", Double, nullable=False),
    Column("deadline_at", Double, nullable=False),
    Column("ranks", Text, nullable=False),
    PrimaryKeyConstraint("preemptor", "device"),
    **HOT,
)

device = Table(
    "device",
    metadata,
    Column("key", Text, primary_key=True),
    Column("node", Text, nullable=False),
    Column("uuid", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("index", Integer, nullable=False),
    Column("physical_mb", Integer, nullable=False),
    Column("reserve_mb", Integer, nullable=False),
    Column("declared_foreign_mb", Integer, nullable=False),
    Column("parent", Text, nullable=False),
    Column("split", Boolean, nullable=False),
    Column("power", Integer, nullable=False),
    Column("context_mb", Integer, nullable=False),
    Column("simulated", Boolean, nullable=False),
    Column("present", Boolean, nullable=False),
    Column("version", Integer, nullable=False),
    Column("leased_mb", Integer, nullable=False, server_default=text("0")),
    Column("closure", Text),
    CheckConstraint("leased_mb >= 0 AND leased_mb <= physical_mb", name="leased_mb"),
    **HOT,
)
"""The devices. `leased_mb` is the sum of the device's unreleased leases in MiB, kept by the transactions that
change the leases. Its CHECK catches mistakes of the ledger; a correct plan never violates it."""

node = Table(
    "node",
    metadata,
    Column("name", Text, primary_key=True),
    Column("cpu", Double, nullable=False),
    Column("memory_mb", Integer, nullable=False),
    Column("max_runs", Integer, nullable=False),
    Column("incarnation", Text, nullable=False),
    Column("boot_id", Text, nullable=False),
    Column("ready", Boolean, nullable=False),
    Column("cordoned", Boolean, nullable=False),
    Column("labels", Text, nullable=False),
    Column("custom", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("cordon_reason", Text, nullable=False, server_default=text("''")),
    Column("draining_since", Double),
    Column("drain_deadline_at", Double),
    Column("cordoned_by", Text, nullable=False, server_default=text("''")),
    Column("cordoned_at", Double),
    Column("environments", Text, nullable=False, server_default=text("'[]'")),
    **HOT,
)

request = Table(
    "request",
    metadata,
    Column("id", Id, primary_key=True),
    Column("task", Id, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("what", Text, nullable=False),
    Column("fields", Text, nullable=False),
    Column("made_at", Double, nullable=False),
    **HOT,
)
"""Requests of clients that the leader has not carried out yet."""

event = Table(
    "event",
    metadata,
    Column("position", Count, primary_key=True, autoincrement=False),
    Column("at", Double, nullable=False),
    Column("kind", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("task", Id),
    Column("fields", Text, nullable=False),
    Column("reader", Integer, nullable=False),
)
"""The event log. `reader` is the form of the event. Software that cannot read this form must not read past
the event."""

Index("ix_event_task_position", event.c.task, event.c.position, **where("task IS NOT NULL"))

finished = Table(
    "finished",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("n", Count, nullable=False),
    PrimaryKeyConstraint("tenant", "state"),
    **HOT,
)
"""The number of each tenant's tasks that ever ended in each state, including tasks that were pruned."""

estimate = Table(
    "estimate",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("what", Text, nullable=False),
    Column("learned_at", Double, nullable=False),
    Column("counts", Text, nullable=False),
    PrimaryKeyConstraint("tenant", "subject", "kind", "what"),
    one_of("what", What),
    **HOT,
)
"""Sketches of the resources that past runs used. `counts` is a sketch as JSON."""

usage = Table(
    "usage",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("held_mb", Count, nullable=False),
    Column("mb_seconds", Double, nullable=False),
    Column("at", Double, nullable=False),
    **HOT,
)
"""The MiB that each tenant has held since its leases last changed, at `at`, and the decayed MiB-seconds that
it had used by then."""

queue_pause = Table(
    "queue_pause",
    metadata,
    Column("queue", Text, primary_key=True),
    Column("at", Double, nullable=False),
    Column("actor", Text, nullable=False),
    Column("reason", Text, nullable=False),
)
"""Queues of tenants and of work streams that start nothing."""

stored_object = Table(
    "stored_object",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("size_bytes", Count, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    PrimaryKeyConstraint("tenant", "digest"),
    Index("ix_stored_object_digest", "digest"),
    Index("ix_stored_object_expires_at", "expires_at"),
)
"""Uploaded objects; each row names a file in the directory of objects."""

run_log = Table(
    "run_log",
    metadata,
    Column("task", Id, nullable=False),
    Column("fence", Integer, nullable=False),
    Column("rank", Integer, nullable=False),
    Column("stream", Text, nullable=False),
    Column("first_byte", Count, nullable=False),
    Column("size_bytes", Count, nullable=False),
    Column("at", Double, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("data", LargeBinary),
    Column("digest", Text),
    PrimaryKeyConstraint("task", "fence", "rank", "stream", "first_byte"),
    Index("ix_run_log_digest", "digest", **where("digest IS NOT NULL")),
)
"""Parts of the logs of runs, each with its bytes or with the digest of the object that has them. An empty
part says that the log had no more bytes at that time."""

run_output = Table(
    "run_output",
    metadata,
    Column("task", Id, nullable=False),
    Column("fence", Integer, nullable=False),
    Column("rank", Integer, nullable=False),
    Column("at", Double, nullable=False),
    Column("files", Integer, nullable=False),
    Column("digest", Text),
    Column("size_bytes", Count, nullable=False),
    Column("message", Text, nullable=False),
    PrimaryKeyConstraint("task", "fence", "rank"),
)
"""The output files that were collected from runs: the digest of the object that has them, or the reason why
there is none."""

DIGESTS = (
    task_spec.c.arguments_digest, outcome.c.result_digest, checkpoint.c.digest, item_page.c.digest,
    stored_object.c.digest, run_log.c.digest,
)  # fmt: skip
"""All columns that name objects. An object that no row names in them may be deleted."""
