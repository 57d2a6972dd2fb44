"""objects of functions"""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = depends_on = None


def upgrade() -> None:
    op.add_column("task_spec", sa.Column("objects", sa.Text, nullable=False, server_default=sa.text("'[]'")))


def downgrade() -> None:
    op.drop_column("task_spec", "objects")
