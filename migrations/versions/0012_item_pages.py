"""results of the items of arrays"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = depends_on = None

ID = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "item_page",
        sa.Column("array", ID, nullable=False),
        sa.Column("first", sa.Integer, nullable=False),
        sa.Column("page", sa.Integer, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("count", sa.Integer, nullable=False),
        sa.Column("failed", sa.Integer, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("lines", sa.LargeBinary, nullable=False),
        sa.Column("digest", sa.Text),
        sa.PrimaryKeyConstraint("array", "first", name=op.f("pk_item_page")),
    )
    op.create_index("ix_item_page_page", "item_page", ["array", "page"], unique=True)
    named = sa.text("digest IS NOT NULL")
    op.create_index(
        "ix_item_page_digest", "item_page", ["digest"], sqlite_where=named, postgresql_where=named
    )


def downgrade() -> None:
    op.drop_table("item_page")
