"""work streams"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = depends_on = None


def upgrade() -> None:
    op.create_table(
        "work_stream",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("curriculum", sa.Double()),
        sa.Column("progress", sa.Double()),
        sa.Column("progress_at", sa.Double(), nullable=False),
        sa.Column("velocity_per_hour", sa.Double(), nullable=False),
        sa.Column("data_at", sa.Double()),
        sa.Column("quality", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_work_stream"),
    )


def downgrade() -> None:
    op.drop_table("work_stream")
