"""draining nodes"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = depends_on = None


def upgrade() -> None:
    op.add_column("node", sa.Column("cordon_reason", sa.Text(), nullable=False, server_default=sa.text("''")))
    op.add_column("node", sa.Column("draining_since", sa.Double()))
    op.add_column("node", sa.Column("drain_deadline_at", sa.Double()))


def downgrade() -> None:
    for name in ("drain_deadline_at", "draining_since", "cordon_reason"):
        op.drop_column("node", name)
