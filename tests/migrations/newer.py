"""Software of a later release, as far as a database meets it: one migration more."""

import shutil
from pathlib import Path

from alembic import command
from alembic.config import Config
from gpubroker_server.adapters.sql.system_tables import SCHEMA
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"
NEXT = SCHEMA + 1

_FILE = """
from alembic import op
revision, down_revision, branch_labels, depends_on = "{next:04}", "{last:04}", None, None
def upgrade():
    for statement in {statements!r}:
        op.execute(statement)
"""

EXPAND = ("ALTER TABLE task ADD COLUMN colour TEXT NOT NULL DEFAULT 'grey'", "CREATE TABLE news (id INTEGER)")
"""What only adds: old software neither reads nor writes it."""
CONTRACT = ("ALTER TABLE request DROP COLUMN fields", f"UPDATE log_head SET compatible_from = {NEXT}")
"""What takes away, and says so."""


def migrate_as_newer_software_does(url: str, folder: Path, *statements: str) -> None:
    shutil.copytree(MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    text = _FILE.format(next=NEXT, last=SCHEMA, statements=statements)
    (folder / "versions" / f"{NEXT:04}_next.py").write_text(text, encoding="utf-8")
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"), poolclass=NullPool)
    with engine.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(folder))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
