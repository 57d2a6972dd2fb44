"""Port to the secrets of tenants."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol


class SecretStore(Protocol):
    """The secrets by tenant and name. All processes on one database see the same secrets. Each call may raise
    StoreUnavailable."""

    async def put(self, tenant: str, name: str, text: str) -> None:
        """Store a secret, and return once it is durable."""

    async def names(self, tenant: str) -> Sequence[str]:
        """Return the names of the tenant's secrets, sorted."""

    async def read(self, tenant: str, names: Iterable[str]) -> Mapping[str, str]:
        """Return the texts by name, without those that the tenant does not have."""

    async def drop(self, tenant: str, name: str) -> bool:
        """Remove a secret. Returns False if there is none of this name."""
