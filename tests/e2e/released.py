"""Software of the last release, from its wheels, beside that of this tree."""

import sys
import zipfile
from pathlib import Path

from tests.e2e.service_process import ROOT

WHEELS = sorted((ROOT / "tests/releases").glob("*.whl"))
THIS_TREE = f"{ROOT / 'service'}:{ROOT / 'client'}"


def unpacked(folder: Path) -> str:
    """Where to import it from, as in PYTHONPATH."""
    assert len(WHEELS) == 2, f"one wheel of each distribution, and not {WHEELS}"
    for wheel in WHEELS:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return str(folder)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "gpubroker_server", *words]
