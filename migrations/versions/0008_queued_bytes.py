"""queued bytes"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = depends_on = None

COUNT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("task", sa.Column("queued_bytes", COUNT, nullable=False, server_default=sa.text("0")))


def downgrade() -> None:
    op.drop_column("task", "queued_bytes")
