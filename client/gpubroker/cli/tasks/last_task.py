"""What this command line remembers between two calls: the newest task it submitted, per service."""

import contextlib
import json
import os
import tempfile
from pathlib import Path


def remember(url: str, task: str) -> None:
    """A home that cannot be written to costs the word `last`, never the submit."""
    path = _file()
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "w") as file:
            json.dump({**_known(), url: task}, file)
        Path(draft).replace(path)


def submitted(url: str) -> str | None:
    return _known().get(url)


def _known() -> dict[str, str]:
    try:
        known = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _file() -> Path:
    # Not the service's own directory, which may be somebody else's or on another machine.
    state = os.environ.get("XDG_STATE_HOME")
    base = Path(state) if state else Path.home() / ".local" / "state"
    return base / "gpubroker-client" / "last.json"
