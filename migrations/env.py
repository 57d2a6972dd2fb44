"""Run by alembic. The service hands its connection over.

For `alembic revision --autogenerate`, name a database at head: `alembic -x url=sqlite:///a.db ...`.
"""

from alembic import context
from gpubroker_server.adapters.sql.tables import metadata
from sqlalchemy import Connection, create_engine


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        transactional_ddl=True,
        render_as_batch=connection.dialect.name == "sqlite",
    )
    with context.begin_transaction():
        context.run_migrations()


handed_over = context.config.attributes.get("connection")
if handed_over is not None:
    run(handed_over)
else:
    url = context.get_x_argument(as_dictionary=True).get("url", "sqlite://")
    with create_engine(url).begin() as made_here:
        run(made_here)
