"""first schema"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = depends_on = None

ID = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
COUNT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
HOT: dict[str, Any] = {
    "sqlite_with_rowid": False,
    "postgresql_with": {
        "fillfactor": "70",
        "autovacuum_vacuum_scale_factor": "0.02",
        "autovacuum_vacuum_threshold": "200",
        "autovacuum_analyze_scale_factor": "0.02",
    },
}


def _where(sqlite: str, postgresql: str = "") -> dict[str, Any]:
    return {"sqlite_where": sa.text(sqlite), "postgresql_where": sa.text(postgresql or sqlite)}


def _texts(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text(), nullable=False) for name in names]


def upgrade() -> None:
    _tasks()
    _task_indexes()
    _beside_tasks()
    _left_by_runs()
    _nodes_and_devices()
    _leases_and_pledges()
    _log()
    _estimates_and_usage()
    _people()
    op.execute("INSERT INTO log_head (id, position, compatible_from) VALUES (1, 0, 1)")
    op.execute("INSERT INTO leadership (id, term, holder, taken_at, lease_until) VALUES (1, 0, '', 0, 0)")


def _tasks() -> None:
    op.create_table(
        "task",
        sa.Column("id", ID, nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("demand", sa.Text(), nullable=False),
        sa.Column("submitted_at", sa.Double(), nullable=False),
        sa.Column("max_retries", sa.Integer(), nullable=False),
        sa.Column("timeout_seconds", sa.Double(), nullable=True),
        sa.Column("grace_seconds", sa.Double(), nullable=False),
        sa.Column("shareable", sa.Boolean(), nullable=False),
        sa.Column("after", sa.Text(), nullable=False),
        sa.Column("queue_ttl_seconds", sa.Double(), nullable=True),
        sa.Column("deadline_at", sa.Double(), nullable=True),
        sa.Column("expected_seconds", sa.Double(), nullable=True),
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("external", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), server_default="pending", nullable=False),
        sa.Column("version", sa.Integer(), server_default=sa.text("1"), nullable=False),
        sa.Column("fence", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("held", sa.Boolean(), nullable=False),
        sa.Column("awaits", sa.Boolean(), nullable=False),
        sa.Column("failed_by", ID, nullable=True),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("not_before", sa.Double(), nullable=True),
        sa.Column("failures", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("preemptions", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("node", sa.Text(), nullable=True),
        sa.Column("admitted_at", sa.Double(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("checkpoint_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("stop_reason", sa.Text(), nullable=True),
        sa.Column("stop_deadline_at", sa.Double(), nullable=True),
        sa.Column("freeing_for", ID, nullable=True),
        sa.Column("members", sa.Text(), nullable=True),
        sa.Column("finished", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("ended_as", sa.Text(), nullable=True),
        sa.Column("idem_key", sa.Text(), nullable=True),
        sa.Column("body_hash", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "finished = (state IN ('cancelled', 'expired', 'failed', 'succeeded'))",
            name=op.f("ck_task_finished"),
        ),
        sa.CheckConstraint(
            "state IN ('pending', 'admitted', 'running', 'stopping', "
            "'succeeded', 'failed', 'cancelled', 'expired')",
            name=op.f("ck_task_state"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_task")),
        **HOT,
    )


def _task_indexes() -> None:
    op.create_index("ix_task_dependent", "task", ["tenant", "id"], **_where("after <> '[]'"))
    op.create_index(
        "ix_task_finished",
        "task",
        ["tenant", "ended_as", "id"],
        **_where("finished = 1", "finished"),
    )
    op.create_index("ix_task_tenant_id", "task", ["tenant", "id"])
    op.create_index(
        "ix_task_tenant_idem_key",
        "task",
        ["tenant", "idem_key"],
        unique=True,
        **_where("idem_key IS NOT NULL"),
    )
    op.create_index(
        "ix_task_unfinished",
        "task",
        ["tenant", "id"],
        **_where("finished = 0", "NOT finished"),
    )
    # After the index of all tasks: of two that it thinks as good SQLite takes the one that was made last.
    op.create_index("ix_task_external", "task", ["tenant", "id"], **_where("external IS NOT NULL"))


def _beside_tasks() -> None:
    op.create_table(
        "task_spec",
        sa.Column("task", ID, nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("entrypoint", sa.Text(), nullable=False),
        sa.Column("command", sa.Text(), nullable=False),
        sa.Column("arguments", sa.LargeBinary(), nullable=False),
        sa.Column("arguments_digest", sa.Text(), nullable=True),
        sa.Column("python", sa.Text(), nullable=False),
        sa.Column("env", sa.Text(), nullable=False),
        sa.Column("result_format", sa.Text(), nullable=False),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.Column("model_type", sa.Text(), nullable=False),
        sa.Column("working_directory", sa.Text(), nullable=False),
        sa.Column("sizing", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("task", name=op.f("pk_task_spec")),
    )
    op.create_index(
        "ix_task_spec_arguments_digest",
        "task_spec",
        ["arguments_digest"],
        **_where("arguments_digest IS NOT NULL"),
    )
    op.create_table(
        "task_label",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("task", ID, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "key", "value", "task", name=op.f("pk_task_label")),
        sqlite_with_rowid=False,
    )


def _left_by_runs() -> None:
    op.create_table(
        "outcome",
        sa.Column("task", ID, nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("ending", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("result", sa.LargeBinary(), nullable=True),
        sa.Column("result_digest", sa.Text(), nullable=True),
        sa.Column("result_format", sa.Text(), nullable=False),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("log_tail", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("task", "fence", name=op.f("pk_outcome")),
    )
    op.create_index(
        "ix_outcome_result_digest",
        "outcome",
        ["result_digest"],
        **_where("result_digest IS NOT NULL"),
    )
    op.create_table(
        "checkpoint",
        sa.Column("task", ID, nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("size_bytes", COUNT, nullable=False),
        sa.Column("uri", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("task", "fence", "sequence", name=op.f("pk_checkpoint")),
    )
    op.create_index("ix_checkpoint_digest", "checkpoint", ["digest"])
    op.create_table(
        "request",
        sa.Column("id", ID, nullable=False),
        sa.Column("task", ID, nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("what", sa.Text(), nullable=False),
        sa.Column("fields", sa.Text(), nullable=False),
        sa.Column("made_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_request")),
        **HOT,
    )


def _nodes_and_devices() -> None:
    op.create_table(
        "node",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("cpu", sa.Double(), nullable=False),
        sa.Column("memory_mb", sa.Integer(), nullable=False),
        sa.Column("max_runs", sa.Integer(), nullable=False),
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("boot_id", sa.Text(), nullable=False),
        sa.Column("ready", sa.Boolean(), nullable=False),
        sa.Column("cordoned", sa.Boolean(), nullable=False),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.Column("custom", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_node")),
        **HOT,
    )
    op.create_table(
        "device",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("physical_mb", sa.Integer(), nullable=False),
        sa.Column("reserve_mb", sa.Integer(), nullable=False),
        sa.Column("declared_foreign_mb", sa.Integer(), nullable=False),
        sa.Column("parent", sa.Text(), nullable=False),
        sa.Column("split", sa.Boolean(), nullable=False),
        sa.Column("power", sa.Integer(), nullable=False),
        sa.Column("context_mb", sa.Integer(), nullable=False),
        sa.Column("simulated", sa.Boolean(), nullable=False),
        sa.Column("present", sa.Boolean(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("leased_mb", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.CheckConstraint("leased_mb >= 0 AND leased_mb <= physical_mb", name=op.f("ck_device_leased_mb")),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_device")),
        **HOT,
    )


def _leases_and_pledges() -> None:
    op.create_table(
        "lease",
        sa.Column("holder_kind", sa.Text(), nullable=False),
        sa.Column("holder", ID, nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("mb", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("context_mb", sa.Integer(), nullable=False),
        sa.Column("released", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("overused_mb", sa.Integer(), nullable=False),
        sa.Column("quarantined_at", sa.Double()),
        sa.CheckConstraint("released = (state = 'released')", name=op.f("ck_lease_released")),
        sa.CheckConstraint(
            "state IN ('reserved', 'held', 'releasing', 'released', 'quarantined')",
            name=op.f("ck_lease_state"),
        ),
        sa.CheckConstraint("mb >= 0", name=op.f("ck_lease_mb")),
        sa.PrimaryKeyConstraint("holder_kind", "holder", "fence", "rank", "device", name=op.f("pk_lease")),
        **HOT,
    )
    op.create_index(
        "ix_lease_unreleased",
        "lease",
        ["holder"],
        **_where("released = 0", "NOT released"),
    )
    op.create_table(
        "pledge",
        sa.Column("preemptor", ID, nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("mb", sa.Integer(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("made_at", sa.Double(), nullable=False),
        sa.Column("deadline_at", sa.Double(), nullable=False),
        sa.Column("ranks", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("preemptor", "device", name=op.f("pk_pledge")),
        **HOT,
    )


def _log() -> None:
    op.create_table(
        "log_head",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("position", COUNT, nullable=False),
        sa.Column("compatible_from", sa.Integer(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_log_head_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_log_head")),
        **HOT,
    )
    op.create_table(
        "event",
        sa.Column("position", COUNT, autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("task", ID, nullable=True),
        sa.Column("fields", sa.Text(), nullable=False),
        sa.Column("reader", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_event")),
    )
    op.create_index("ix_event_task_position", "event", ["task", "position"], **_where("task IS NOT NULL"))
    op.create_table(
        "leadership",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("term", sa.Integer(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("taken_at", sa.Double(), nullable=False),
        sa.Column("lease_until", sa.Double(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_leadership_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_leadership")),
        **HOT,
    )
    op.create_table(
        "finished",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("n", COUNT, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "state", name=op.f("pk_finished")),
        **HOT,
    )


def _estimates_and_usage() -> None:
    op.create_table(
        "estimate",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("what", sa.Text(), nullable=False),
        sa.Column("learned_at", sa.Double(), nullable=False),
        sa.Column("counts", sa.Text(), nullable=False),
        sa.CheckConstraint(
            "what IN ('gpu_mb', 'seconds', 'start_error_seconds', 'start_share')",
            name=op.f("ck_estimate_what"),
        ),
        sa.PrimaryKeyConstraint("tenant", "subject", "kind", "what", name=op.f("pk_estimate")),
        **HOT,
    )
    op.create_table(
        "usage",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("held_mb", COUNT, nullable=False),
        sa.Column("mb_seconds", sa.Double(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", name=op.f("pk_usage")),
        **HOT,
    )


def _people() -> None:
    op.create_table(
        "token",
        *_texts("name", "sha256", "tenant", "scopes"),
        sa.Column("max_priority", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_token")),
        sa.UniqueConstraint("sha256", name=op.f("uq_token_sha256")),
    )
    op.create_table(
        "audit",
        sa.Column("id", COUNT, autoincrement=True, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        *_texts("tenant", "actor", "action", "subject", "reason"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )


def downgrade() -> None:
    for table in (
        "audit", "token", "usage", "estimate", "finished", "leadership", "event", "log_head", "node",
        "pledge", "lease", "device", "request", "checkpoint", "outcome", "task_label", "task_spec", "task",
    ):  # fmt: skip
        op.drop_table(table)
    op.execute("DROP TABLE IF EXISTS installation")
