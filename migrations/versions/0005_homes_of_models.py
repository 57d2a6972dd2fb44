"""homes of models"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = depends_on = None


def upgrade() -> None:
    op.add_column("task", sa.Column("model", sa.Text(), nullable=True))
    op.add_column("task", sa.Column("home", sa.Text(), nullable=True))
    op.create_index(
        "ix_task_home", "task", ["home"], unique=True,
        sqlite_where=sa.text("home IS NOT NULL AND finished = 0"),
        postgresql_where=sa.text("home IS NOT NULL AND NOT finished"),
    )  # fmt: skip


def downgrade() -> None:
    op.drop_index("ix_task_home", table_name="task")
    op.drop_column("task", "home")
    op.drop_column("task", "model")
