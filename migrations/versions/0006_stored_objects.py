"""stored objects"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = depends_on = None

COUNT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "stored_object",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("size_bytes", COUNT, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "digest", name=op.f("pk_stored_object")),
    )
    op.create_index("ix_stored_object_digest", "stored_object", ["digest"])
    op.create_index("ix_stored_object_expires_at", "stored_object", ["expires_at"])


def downgrade() -> None:
    op.drop_table("stored_object")
