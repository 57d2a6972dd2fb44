"""run logs"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = depends_on = None

COUNT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
ID = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "run_log",
        sa.Column("task", ID, nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("first_byte", COUNT, nullable=False),
        sa.Column("size_bytes", COUNT, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("data", sa.LargeBinary()),
        sa.Column("digest", sa.Text()),
        sa.PrimaryKeyConstraint("task", "fence", "rank", "stream", "first_byte", name="pk_run_log"),
    )
    some = sa.text("digest IS NOT NULL")
    op.create_index("ix_run_log_digest", "run_log", ["digest"], sqlite_where=some, postgresql_where=some)


def downgrade() -> None:
    op.drop_table("run_log")
