"""environments"""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = depends_on = None


def upgrade() -> None:
    op.add_column("task_spec", sa.Column("environment", sa.Text))
    op.add_column("node", sa.Column("environments", sa.Text, nullable=False, server_default=sa.text("'[]'")))


def downgrade() -> None:
    op.drop_column("node", "environments")
    op.drop_column("task_spec", "environment")
