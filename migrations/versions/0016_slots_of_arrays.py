"""slots of arrays"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = depends_on = None

ID = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
COUNT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
COUNTS = ["array", "page", "count", "failed", "at", "size_bytes"]


def upgrade() -> None:
    op.add_column("task", sa.Column("array", ID))
    op.add_column("item_page", sa.Column("size_bytes", COUNT, nullable=False, server_default=sa.text("0")))
    op.create_index("ix_item_page_counts", "item_page", COUNTS)
    op.drop_index("ix_item_page_page", "item_page")


def downgrade() -> None:
    op.create_index("ix_item_page_page", "item_page", ["array", "page"], unique=True)
    op.drop_index("ix_item_page_counts", "item_page")
    op.drop_column("item_page", "size_bytes")
    op.drop_column("task", "array")
