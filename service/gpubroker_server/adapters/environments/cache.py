"""The environments that this node has prepared, and the files by which a later agent knows them."""

import contextlib
import hashlib
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import structlog
from gpubroker.runtime.messages import RunKey

from gpubroker_server.adapters.environments.builder import BuildDirectories
from gpubroker_server.adapters.environments.interpreters import Interpreter
from gpubroker_server.core.domain.environment_builds import CachedEnvironment, to_remove

log = structlog.get_logger("gpubroker.agent")


class EnvironmentCache:
    """The prepared environments of one node, by key. One is complete if a file beside its directory says how
    to use it; the modification time of that file is the time of its last use."""

    def __init__(self, root: Path, most_bytes: int) -> None:
        self._root = root
        self._most_bytes = most_bytes
        self._known: dict[str, Interpreter] = {}
        self._users: dict[RunKey, str] = {}
        """The environment of each run on this node."""

    def open(self) -> None:
        """Make the directories. Runs may pass through them but not list them. Raises OSError, and
        PermissionError if another user has made one of them."""
        for name, mode in (("", 0o711), ("built", 0o711), ("work", 0o711), ("packages", 0o711)):
            path = self._root / name
            path.mkdir(mode=mode, parents=True, exist_ok=True)
            status = path.lstat()
            if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
                raise PermissionError(f"{path} belongs to another user; remove it, or set ray.work_dir")
            path.chmod(mode)

    def adopt(self) -> None:
        """Read what an earlier agent has prepared, and remove what it did not finish."""
        if not self._root.exists():
            return
        for file in (self._root / "built").glob("*.json"):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                self._known[file.stem] = msgspec.json.decode(file.read_bytes(), type=Interpreter)
        for path in (self._root / "built").iterdir():
            if path.is_dir() and path.name not in self._known:
                shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(self._root / "work", ignore_errors=True)

    def items(self) -> Mapping[str, Interpreter]:
        return self._known

    def find(self, key: str) -> Interpreter | None:
        """Return how to use an environment; None if it is not on this node, or no longer."""
        known = self._known.get(key)
        if known is not None and known.interpreter and not os.access(known.interpreter, os.X_OK):
            self.remove(key)
            return None
        return known

    def place(self, key: str, tenant: str) -> BuildDirectories:
        """Return the directories in which an environment is built."""
        owner = hashlib.sha256(tenant.encode()).hexdigest()[:16]
        return BuildDirectories(
            self._root / "built" / key, self._root / "work" / key, self._root / "packages" / owner
        )

    def log_of(self, key: str) -> Path:
        return self._root / "built" / f"{key}.log"

    def add(self, key: str, prepared: Interpreter) -> list[str]:
        """Note that an environment is complete. Returns the keys of those that were removed to make room.
        Raises OSError."""
        file = self._file_of(key)
        draft = file.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(prepared))
        draft.replace(file)
        self._known[key] = prepared
        return self._make_room()

    def use(self, key: str, run: RunKey) -> None:
        """Keep an environment for a run until `leave`."""
        self._users[run] = key
        with contextlib.suppress(OSError):
            os.utime(self._file_of(key))

    def leave(self, run: RunKey) -> None:
        self._users.pop(run, None)

    def remove(self, key: str) -> None:
        """Remove an environment. The file goes first: without it, the directory counts as unfinished."""
        self._known.pop(key, None)
        self._file_of(key).unlink(missing_ok=True)
        self.log_of(key).unlink(missing_ok=True)
        shutil.rmtree(self._root / "built" / key, ignore_errors=True)

    def clear_work(self, key: str) -> None:
        """Remove the files of a build that has ended, and the environment if it is not complete."""
        shutil.rmtree(self._root / "work" / key, ignore_errors=True)
        if key not in self._known:
            shutil.rmtree(self._root / "built" / key, ignore_errors=True)

    def _make_room(self) -> list[str]:
        removed = to_remove(self._entries(), Counter(self._users.values()), self._most_bytes)
        for key in removed:
            log.info("an environment that was not used lately is removed", environment=key)
            self.remove(key)
        return removed

    def _entries(self) -> Iterator[CachedEnvironment]:
        for key, known in self._known.items():
            if known.size_bytes:
                with contextlib.suppress(OSError):
                    yield CachedEnvironment(key, known.size_bytes, self._file_of(key).stat().st_mtime)

    def _file_of(self, key: str) -> Path:
        return self._root / "built" / f"{key}.json"
