"""several processes"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = depends_on = None

COUNT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
HOT: dict[str, Any] = {
    "sqlite_with_rowid": False,
    "postgresql_with": {
        "fillfactor": "70",
        "autovacuum_vacuum_scale_factor": "0.02",
        "autovacuum_vacuum_threshold": "200",
        "autovacuum_analyze_scale_factor": "0.02",
    },
}


def upgrade() -> None:
    op.create_table(
        "last_value",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("revision", COUNT, nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "key", name=op.f("pk_last_value")),
        **HOT,
    )
    if sa.inspect(op.get_bind()).has_table("installation"):
        return
    op.create_table(
        "installation",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("blobs", sa.Text(), nullable=True),
        sa.Column("token_changes", COUNT, server_default=sa.text("0"), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_installation_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_installation")),
        **HOT,
    )
    op.execute("INSERT INTO installation (id) VALUES (1)")


def downgrade() -> None:
    """`installation` stays until nothing is left: it says which directory of objects belongs to this
    database, and what came before does not see it."""
    op.drop_table("last_value")
