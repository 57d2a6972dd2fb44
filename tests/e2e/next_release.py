"""An installation that is upgraded to the next release: this software, with a new form of its own."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpubroker.runtime import messages
from gpubroker_server.adapters.ray import wire

from tests.e2e.service_process import ROOT


def _newer(protocol: int, earlier: Sequence[int]) -> Mapping[str, str]:
    """It also speaks the form of this release, and none of the `earlier` ones."""
    spoken = f"({', '.join(map(str, earlier))}, PROTOCOL)"
    return {
        f"PROTOCOL = {protocol}\n": f"PROTOCOL = {protocol + 1}\n",
        f"SPOKEN = {spoken}": f"SPOKEN = ({protocol}, PROTOCOL)",
    }


CHANGES = {
    "service/gpubroker_server/adapters/ray/wire.py": _newer(wire.PROTOCOL, wire.SPOKEN[:-1]),
    "client/gpubroker/runtime/messages.py": _newer(messages.PROTOCOL, messages.SPOKEN[:-1]),
}


class Installation:
    """Software in one place, first of this release. It is found by its path, as in a virtual environment:
    what is imported after `upgrade` is of the next one."""

    def __init__(self, folder: Path) -> None:
        self._next, self._path = folder / "next", folder / "installed"
        for part in ("service", "client/gpubroker", "migrations", "examples", "tests/e2e"):
            shutil.copytree(ROOT / part, self._next / part)
        (self._next / "tests/__init__.py").touch()
        for file, changes in CHANGES.items():
            path = self._next / file
            text = path.read_text(encoding="utf-8")
            for this, after in changes.items():
                assert this in text, f"{file} has no {this!r} any more"
                text = text.replace(this, after)
            path.write_text(text, encoding="utf-8")
        self._path.symlink_to(ROOT)

    def upgrade(self) -> None:
        self._path.unlink()
        self._path.symlink_to(self._next)

    @property
    def env(self) -> Mapping[str, str]:
        return {"PYTHONPATH": f"{self._path}:{self._path / 'service'}:{self._path / 'client'}"}

    @property
    def task_path(self) -> list[str]:
        return [str(self._path)]
