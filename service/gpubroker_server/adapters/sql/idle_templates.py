"""The rows of idle templates."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Column, FromClause, Text, delete, or_, select

from gpubroker_server.adapters.sql import statements
from gpubroker_server.adapters.sql.columns import demand_of_text, demand_text
from gpubroker_server.adapters.sql.session import Noted, Session, SqlPart, over
from gpubroker_server.adapters.sql.system_tables import idle_template, token
from gpubroker_server.core.control.idle_templates import Template
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.ports.idle_templates import IdleTemplate

_c = idle_template.c


@over(*_c)
def add_idle_template(insert: Any, r: FromClause) -> Any:
    return statements.insert_given(insert, idle_template, r).on_conflict_do_nothing().returning(_c.name)


@over(Column("name", Text))
def drop_idle_template(_insert: Any, r: FromClause) -> Any:
    return delete(idle_template).where(_c.name.in_(select(r.c.name))).returning(_c.tenant)


@over(Column("name", Text))
def idle_template_made(_insert: Any, r: FromClause) -> Any:
    return select(_c.token, _c.made_at).where(_c.name.in_(select(r.c.name)))


class SqlIdleTemplates(SqlPart):
    """Implements the port `IdleTemplates`."""

    async def put_idle_template(self, template: IdleTemplate) -> bool:
        def act(session: Session) -> Noted[bool]:
            if not session.fetch(add_idle_template, [_row(template)]):
                # The name exists. The row is this template's if the answer to its commit was lost.
                made = session.fetch(idle_template_made, [(template.name,)])
                return Noted(made == [(template.token, template.made_at)])
            note = template.tenant, template.made_by, "idle-template.put", template.name, ""
            return Noted(True, [(session.now(), *note)])

        return await self._write_noted(act)

    async def idle_templates(self, now: Instant | None = None) -> Sequence[IdleTemplate]:
        query = select(*_c).order_by(_c.name)
        if now is not None:
            lives = or_(token.c.expires_at.is_(None), token.c.expires_at > now)
            query = query.join(token, (token.c.sha256 == _c.token) & lives)
        return [_of_row(row) for row in await self._rows(query)]

    async def drop_idle_template(self, name: str, *, by: str) -> bool:
        def act(session: Session) -> Noted[bool]:
            for (tenant,) in session.fetch(drop_idle_template, [(name,)]):
                note = tenant, by, "idle-template.dropped", name, ""
                return Noted(True, [(session.now(), *note)])
            return Noted(False)

        return await self._write_noted(act)


def _row(stored: IdleTemplate) -> tuple[Any, ...]:
    name, demand, weight, max_running = stored.template
    about = stored.task, demand_text(demand), weight, max_running
    return (name, stored.tenant, *about, stored.token, stored.made_by, stored.made_at)


def _of_row(row: Mapping[str, Any]) -> IdleTemplate:
    about = row["name"], demand_of_text(row["demand"]), row["weight"], row["max_running"]
    rest = row["tenant"], row["task"], row["token"], row["made_by"], row["made_at"]
    return IdleTemplate(Template(*about), *rest)
