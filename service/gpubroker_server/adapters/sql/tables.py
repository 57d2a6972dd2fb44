"""Every table, once, for both databases. Times are seconds since 1970 on the database's clock.

Rows of one task stay together by its id without foreign keys: everything is inserted in the transaction
that inserts the task, and a check per row and a lock on the parent would be paid on every write.
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
    UniqueConstraint,
    false,
    text,
)

from gpubroker_server.adapters.sql.columns import HOT, Count, Id, one_of, where
from gpubroker_server.adapters.sql.columns import metadata as metadata
from gpubroker_server.adapters.sql.stage import Stage
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
    one_of("state", TaskState),
    CheckConstraint(
        f"finished = (state IN ({', '.join(repr(state.value) for state in sorted(TERMINAL))}))",
        name="finished",
    ),
    **HOT,
)
"""The hot half of a task. No index holds a column that changes before the task's end, so that on PostgreSQL
every update but the last stays on its page: not `state`, but `ended_as`, which says it at the end."""

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
"""Of each model of a server there is one holder at a time."""
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
)
"""The cold half, as submitted; never changes. `command`, `env`, `labels` and `sizing` are JSON."""

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
"""Labels once more, in the order in which they are searched."""

batch = Table(
    "batch",
    metadata,
    Column("task", Id, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("answer", Text, nullable=False),
)
"""What those were told who submitted many tasks with one key, which the first of these has."""

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
"""What each run left behind; the one with the highest fence is the task's."""

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
)
"""The newest three of each task."""

Index("ix_checkpoint_digest", checkpoint.c.digest)

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
    CheckConstraint("leased_mb >= 0 AND leased_mb <= physical_mb", name="leased_mb"),
    **HOT,
)
"""`leased_mb` is the sum of its leases that are not released, kept by the transactions that change them.
Its CHECK is a net below the ledger in the core, never the way to say no."""

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
"""What clients asked and the leader has not yet carried out; what it has is in the log."""

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
"""`reader`: software that does not read this form of events must not go on past this one."""

Index("ix_event_task_position", event.c.task, event.c.position, **where("task IS NOT NULL"))

log_head = Table(
    "log_head",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("position", Count, nullable=False),
    Column("compatible_from", Integer, nullable=False),
    CheckConstraint("id = 1", name="one_row"),
    **HOT,
)
"""Taken by every transaction that writes. So it is here that a migration says which software may still do so:
that of the schema `compatible_from`, and newer."""

leadership = Table(
    "leadership",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("term", Integer, nullable=False),
    Column("holder", Text, nullable=False),
    Column("taken_at", Double, nullable=False),
    Column("lease_until", Double, nullable=False),
    CheckConstraint("id = 1", name="one_row"),
    **HOT,
)

finished = Table(
    "finished",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("n", Count, nullable=False),
    PrimaryKeyConstraint("tenant", "state"),
    **HOT,
)
"""How many tasks ever ended so; survives the removal of old tasks."""

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
"""What past runs took. `counts` is a sketch as JSON."""

usage = Table(
    "usage",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("held_mb", Count, nullable=False),
    Column("mb_seconds", Double, nullable=False),
    Column("at", Double, nullable=False),
    **HOT,
)
"""What each tenant holds since its last change of leases, and what it had used by then."""

token = Table(
    "token",
    metadata,
    Column("name", Text, primary_key=True),
    Column("sha256", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("scopes", Text, nullable=False),
    Column("max_priority", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    UniqueConstraint("sha256"),
)

audit = Table(
    "audit",
    metadata,
    Column("id", Count, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("reason", Text, nullable=False),
)
"""Who took the lead, which tokens came and went and by whose word, who stopped the service, and who stated
what was then taken for a fact. What is a row of its own is noted in the transaction that wrote it. `reason`:
in the words of whoever did it, where any are asked for."""

relocation = Table(
    "relocation",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("move", Text, nullable=False),
    Column("stage", Text, nullable=False),
    Column("other", Text, nullable=False),
    Column("at", Double, nullable=False),
    CheckConstraint("id = 1", name="one_row"),
    one_of("stage", Stage),
)
"""Where all of this goes to or has come from (`adapters.sql.relocation`); no row where it began and stays.
`other`: the other database, in words."""
