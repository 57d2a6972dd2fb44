"""Secrets of tenants, in memory."""

from collections.abc import Iterable, Mapping, Sequence


class MemorySecrets:
    def __init__(self) -> None:
        self._texts: dict[tuple[str, str], str] = {}

    async def put(self, tenant: str, name: str, text: str) -> None:
        self._texts[tenant, name] = text

    async def names(self, tenant: str) -> Sequence[str]:
        return sorted(name for owner, name in self._texts if owner == tenant)

    async def read(self, tenant: str, names: Iterable[str]) -> Mapping[str, str]:
        return {name: self._texts[tenant, name] for name in names if (tenant, name) in self._texts}

    async def drop(self, tenant: str, name: str) -> bool:
        return self._texts.pop((tenant, name), None) is not None
