"""what uses a retry"""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = depends_on = None


def upgrade() -> None:
    op.add_column("task", sa.Column("retry_on", sa.Text))


def downgrade() -> None:
    op.drop_column("task", "retry_on")
