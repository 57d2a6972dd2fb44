"""pauses of queues, and when the agent had the order of a run"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = depends_on = None


def upgrade() -> None:
    op.add_column("task", sa.Column("ordered_at", sa.Double(), nullable=True))
    op.create_table(
        "queue_pause",
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("queue", name="pk_queue_pause"),
    )


def downgrade() -> None:
    op.drop_table("queue_pause")
    op.drop_column("task", "ordered_at")
