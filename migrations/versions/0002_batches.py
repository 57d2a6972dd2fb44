"""what was answered to batches"""

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


def downgrade() -> None:
    op.drop_table("batch")
