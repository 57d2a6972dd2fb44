"""causes of stops"""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = depends_on = None


def upgrade() -> None:
    op.add_column("task", sa.Column("stop_cause", sa.Text))
    op.add_column("node", sa.Column("cordoned_by", sa.Text(), nullable=False, server_default=sa.text("''")))
    op.add_column("node", sa.Column("cordoned_at", sa.Double()))


def downgrade() -> None:
    op.drop_column("node", "cordoned_at")
    op.drop_column("node", "cordoned_by")
    op.drop_column("task", "stop_cause")
