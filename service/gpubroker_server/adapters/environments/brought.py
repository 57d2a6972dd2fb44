"""A copy of what the interpreters of environments need of gpubroker: its client package and cloudpickle."""

import hashlib
import shutil
from compileall import compile_dir
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("gpubroker", "cloudpickle")


class Brought:
    """The copy of one node. Every user may read it. Its name contains the digest of its files, so runs of an
    earlier release keep theirs."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: Path | None = None

    def for_functions(self) -> str:
        """Return the directory with gpubroker and cloudpickle. Raises OSError."""
        return str(self._copy() / "functions")

    def for_commands(self) -> str:
        """Return the directory with gpubroker alone, since a program may have a cloudpickle of its own.
        Raises OSError."""
        return str(self._copy() / "commands")

    def _copy(self) -> Path:
        if self._made is not None and self._made.exists():
            return self._made
        path = self._root / f"gpubroker-{_digest()}"
        if not path.exists():
            draft = path.with_suffix(".new")
            shutil.rmtree(draft, ignore_errors=True)
            for package in _directories():
                ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
                shutil.copytree(package, draft / "functions" / package.name, ignore=ignored)
            (draft / "commands").mkdir()
            (draft / "commands/gpubroker").symlink_to("../functions/gpubroker")
            for inner in (draft, *draft.rglob("*")):
                if not inner.is_symlink():
                    inner.chmod(0o755 if inner.is_dir() else 0o644)
            # The users of runs cannot write bytecode here. That of another minor version is made in memory.
            compile_dir(draft, quiet=1)
            draft.rename(path)
        self._made = path
        return path


def _directories() -> list[Path]:
    found = (find_spec(name) for name in PACKAGES)
    return [Path(spec.origin).parent for spec in found if spec is not None and spec.origin is not None]


def _digest() -> str:
    digest = hashlib.sha256()
    for package in _directories():
        for file in sorted(package.rglob("*.py")):
            digest.update(str(file.relative_to(package.parent)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
