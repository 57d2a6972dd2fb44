"""Secrets as files of mode 0600, `<tenant>/<name>`, in directories of mode 0700."""

import asyncio
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import TypeVar

from gpubroker_server.adapters.blobs.directory import sync_folder
from gpubroker_server.ports.store import StoreUnavailable

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Matches the names of tenants and secrets. No such name leads out of the directory."""

T = TypeVar("T")


class SecretFiles:
    """Secrets below one directory, which all processes on one database share."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def put(self, tenant: str, name: str, text: str) -> None:
        await self._run(lambda: self._put(self._path(tenant, name), text))

    async def names(self, tenant: str) -> Sequence[str]:
        return await self._run(lambda: self._names(tenant))

    async def read(self, tenant: str, names: Iterable[str]) -> Mapping[str, str]:
        return await self._run(
            lambda: {name: self._text(tenant, name) for name in {*names} & {*self._names(tenant)}}
        )

    async def drop(self, tenant: str, name: str) -> bool:
        return await self._run(lambda: self._drop(tenant, name))

    async def _run(self, act: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(act)
        except OSError as error:
            raise StoreUnavailable(
                f"the secrets below {self._root} cannot be used: {error.strerror}; make room, or give this "
                "user access"
            ) from error

    def _put(self, path: Path, text: str) -> None:
        for folder in (self._root, path.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        draft = path.with_name(f".{token_hex(8)}")
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        for folder in (path.parent, self._root, self._root.parent):
            sync_folder(folder)

    def _text(self, tenant: str, name: str) -> str:
        path = self._path(tenant, name)
        try:
            return path.read_bytes().decode()
        except UnicodeDecodeError as fault:
            raise StoreUnavailable(
                f"the secret in {path} cannot be used: its bytes are no UTF-8; set it again with "
                f"`gpubroker secrets set {name}`"
            ) from fault

    def _names(self, tenant: str) -> Sequence[str]:
        folder = self._root / tenant
        if _NAME.fullmatch(tenant) is None or not folder.exists():
            return []
        return sorted(path.name for path in folder.iterdir() if _NAME.fullmatch(path.name))

    def _drop(self, tenant: str, name: str) -> bool:
        if name not in self._names(tenant):
            return False
        path = self._path(tenant, name)
        path.unlink(missing_ok=True)
        sync_folder(path.parent)
        return True

    def _path(self, tenant: str, name: str) -> Path:
        for part in (tenant, name):
            # This is a mistake in the code, because requests with such names are refused.
            if _NAME.fullmatch(part) is None:
                raise ValueError(f"{part!r} is no name of a secret's file, or leads out of its directory")
        return self._root / tenant / name
