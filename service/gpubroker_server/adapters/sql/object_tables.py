"""The table of what tenants have uploaded."""

from sqlalchemy import Column, Double, Index, PrimaryKeyConstraint, Table, Text

from gpubroker_server.adapters.sql.columns import Count, metadata

stored_object = Table(
    "stored_object",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("size_bytes", Count, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    PrimaryKeyConstraint("tenant", "digest"),
    Index("ix_stored_object_digest", "digest"),
    Index("ix_stored_object_expires_at", "expires_at"),
)
"""Each names a file in the directory of objects, for as long as it is there."""
