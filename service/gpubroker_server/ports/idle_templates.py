"""Port to the idle templates: tasks that are submitted again and again as long as devices are idle."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from gpubroker_server.core.control.idle_templates import Template
from gpubroker_server.core.domain.units import Instant


class IdleTemplate(Struct, frozen=True):
    template: Template
    tenant: str
    task: str
    """The request body of the template's tasks, as JSON text."""
    token: str
    """The sha256 of the token that made the template. The template's tasks are submitted for this token's
    holder."""
    made_by: str
    """The name of the token that made the template."""
    made_at: Instant

    @property
    def name(self) -> str:
        return self.template.name


class IdleTemplates(Protocol):
    """The stored idle templates. Each call may raise StoreUnavailable."""

    async def put_idle_template(self, template: IdleTemplate) -> bool:
        """Add a template. Returns False if the name exists."""

    async def idle_templates(self, now: Instant | None = None) -> Sequence[IdleTemplate]:
        """Return the templates, sorted by name. With `now`, return only templates whose token exists and has
        not expired at that time."""

    async def drop_idle_template(self, name: str, *, by: str) -> bool:
        """Remove a template. Returns False if there is none of this name."""
