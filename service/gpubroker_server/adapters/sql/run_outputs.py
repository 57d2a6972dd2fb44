"""The rows of the output files that were collected from runs."""

from collections.abc import Sequence

from msgspec.structs import astuple
from sqlalchemy import Connection, bindparam, select

from gpubroker_server.adapters.sql.session import SqlPart
from gpubroker_server.adapters.sql.statements import OnConflict, insert_into
from gpubroker_server.adapters.sql.tables import run_output
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.ports.run_outputs import RunOutput

_c = run_output.c
_OF_TASK = select(*_c).where(_c.task == bindparam("task")).order_by(_c.fence, _c.rank)

put_output = insert_into(run_output, known=OnConflict.REPLACE)


class SqlRunOutputs(SqlPart):
    """Implements the port `OutputRows`."""

    async def keep_output(self, output: RunOutput) -> None:
        await self._write_alone(lambda session: session.write(put_output, [astuple(output)]))

    async def outputs_of(self, task: TaskId) -> Sequence[RunOutput]:
        return await self._readers.run(_find, task)


def _find(connection: Connection, task: TaskId) -> Sequence[RunOutput]:
    return [RunOutput(*row) for row in connection.execute(_OF_TASK, {"task": task})]
