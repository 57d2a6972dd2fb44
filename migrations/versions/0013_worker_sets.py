"""worker sets"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = depends_on = None

ID = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "worker_set",
        sa.Column("id", ID, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("fields", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_worker_set")),
    )


def downgrade() -> None:
    op.drop_table("worker_set")
