"""lineage"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = depends_on = None

COUNT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("leadership", sa.Column("lineage", COUNT, nullable=False, server_default=sa.text("0")))
    op.add_column("leadership", sa.Column("server", sa.Text(), nullable=False, server_default=sa.text("''")))


def downgrade() -> None:
    op.drop_column("leadership", "server")
    op.drop_column("leadership", "lineage")
