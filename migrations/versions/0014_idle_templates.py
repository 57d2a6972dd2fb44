"""idle templates"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = depends_on = None


def upgrade() -> None:
    op.create_table(
        "idle_template",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("task", sa.Text, nullable=False),
        sa.Column("demand", sa.Text, nullable=False),
        sa.Column("weight", sa.Integer, nullable=False),
        sa.Column("max_running", sa.Integer, nullable=False),
        sa.Column("token", sa.Text, nullable=False),
        sa.Column("made_by", sa.Text, nullable=False),
        sa.Column("made_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_idle_template")),
    )


def downgrade() -> None:
    op.drop_table("idle_template")
