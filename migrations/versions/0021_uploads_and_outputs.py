"""uploads and outputs"""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = depends_on = None

COUNT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
ID = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("task_spec", sa.Column("upload", sa.Text, nullable=False, server_default=sa.text("''")))
    op.add_column("task_spec", sa.Column("outputs", sa.Text, nullable=False, server_default=sa.text("'[]'")))
    op.create_table(
        "run_output",
        sa.Column("task", ID, nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("files", sa.Integer(), nullable=False),
        sa.Column("digest", sa.Text()),
        sa.Column("size_bytes", COUNT, nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("task", "fence", "rank", name="pk_run_output"),
    )


def downgrade() -> None:
    op.drop_table("run_output")
    op.drop_column("task_spec", "outputs")
    op.drop_column("task_spec", "upload")
