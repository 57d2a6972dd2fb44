"""The tables by which several processes on one database know of each other."""

from sqlalchemy import CheckConstraint, Column, Integer, PrimaryKeyConstraint, Table, Text, text

from gpubroker_server.adapters.sql.columns import HOT, Count, metadata

last_value = Table(
    "last_value",
    metadata,
    Column("kind", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("revision", Count, nullable=False),
    Column("value", Text, nullable=False),
    PrimaryKeyConstraint("kind", "key"),
    **HOT,
)
"""What the leader has last said that is no event: measured devices, progress of runs, itself. `value` is
JSON; `revision` rises with each write and each term, so that no older leader's word takes its place."""

installation = Table(
    "installation",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("blobs", Text),
    Column("token_changes", Count, nullable=False, server_default=text("0")),
    CheckConstraint("id = 1", name="one_row"),
    **HOT,
)
"""Facts of the whole. `blobs`: which directory of objects belongs to this database. `token_changes` counts
them, for those who hold tokens in memory."""
