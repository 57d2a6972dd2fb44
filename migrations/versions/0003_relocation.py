"""relocation: a part of the first schema, in a file of its own for its length"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = depends_on = None


def upgrade() -> None:
    op.create_table(
        "relocation",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("move", sa.Text(), nullable=False),
        sa.Column("stage", sa.Text(), nullable=False),
        sa.Column("other", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_relocation_one_row")),
        sa.CheckConstraint(
            "stage IN ('leaving', 'coming', 'gone', 'here')",
            name=op.f("ck_relocation_stage"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_relocation")),
    )


def downgrade() -> None:
    op.drop_table("relocation")
