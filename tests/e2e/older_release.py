"""The software of the release before, as agents and runs meet it: this one, with its number and form."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from gpubroker.runtime import messages
from gpubroker_server.adapters.ray import wire

from tests.e2e.service_process import ROOT

RAY = "service/gpubroker_server/adapters/ray"
_SPOKEN = {"SPOKEN = (PROTOCOL - 1, PROTOCOL)": "SPOKEN = (PROTOCOL,)"}
CHANGES: Mapping[str, Mapping[str, str]] = {
    f"{RAY}/wire.py": {f"PROTOCOL = {wire.PROTOCOL}": f"PROTOCOL = {wire.PROTOCOL - 1}", **_SPOKEN},
    "client/gpubroker/runtime/messages.py": {
        f"PROTOCOL = {messages.PROTOCOL}": f"PROTOCOL = {messages.PROTOCOL - 1}",
        **_SPOKEN,
    },
    f"{RAY}/agent/runner.py": {
        'forms = {"protocol": SPOKEN[0], "speaks": SPOKEN}': 'forms = {"protocol": SPOKEN[0]}',
        "RunOrder.from_wire(": "RunOrder(**",
    },
    f"{RAY}/agent/node_agent.py": {"RunOrder.from_wire(": "RunOrder(**"},
    f"{RAY}/agent/handshake.py": {'told.get("speaks", (told["protocol"],))': '(told["protocol"],)'},
}


class Installation:
    """Software in one place, first of the release before. It is found by its path, as in a virtual
    environment: what is imported after `upgrade` is of this release."""

    def __init__(self, folder: Path) -> None:
        older, self._path = folder / "older", folder / "installed"
        for part in ("service", "client/gpubroker", "migrations", "examples", "tests/e2e"):
            shutil.copytree(ROOT / part, older / part)
        (older / "tests/__init__.py").touch()
        for file, changes in CHANGES.items():
            path = older / file
            text = path.read_text(encoding="utf-8")
            for new, old in changes.items():
                assert new in text, f"{file} has no {new!r} any more"
                text = text.replace(new, old)
            path.write_text(text, encoding="utf-8")
        self._path.symlink_to(older)

    def upgrade(self) -> None:
        self._path.unlink()
        self._path.symlink_to(ROOT)

    @property
    def env(self) -> Mapping[str, str]:
        return {"PYTHONPATH": f"{self._path}:{self._path / 'service'}:{self._path / 'client'}"}

    @property
    def task_path(self) -> list[str]:
        return [str(self._path)]
