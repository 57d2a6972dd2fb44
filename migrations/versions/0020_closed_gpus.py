"""closed GPUs"""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = depends_on = None


def upgrade() -> None:
    op.add_column("device", sa.Column("closure", sa.Text))


def downgrade() -> None:
    op.drop_column("device", "closure")
