"""what was answered to batches, and finding what ended long ago"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = depends_on = None

ID = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "batch",
        sa.Column("task", ID, nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("task", name=op.f("pk_batch")),
    )
    op.create_index(
        "ix_task_finished_at", "task", ["finished_at"],
        sqlite_where=sa.text("finished = 1"), postgresql_where=sa.text("finished"),
    )  # fmt: skip


def downgrade() -> None:
    op.drop_index("ix_task_finished_at", table_name="task")
    op.drop_table("batch")
