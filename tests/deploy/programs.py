"""The programs that `make tools` unpacks."""

import subprocess
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PLACE = ROOT / ".tools/deploy"
SCHEMAS = sorted(PLACE.glob("kubernetes-v*"))
"""Kubernetes' own, one folder for each version."""


def program(name: str) -> str:
    """Its path. Where it cannot be had, the test says why it did not run."""
    missing = PLACE / "missing" / name
    if missing.exists():
        pytest.skip(f"did not run {name}: {missing.read_text(encoding='utf-8').strip()}")
    found = PLACE / "bin" / name
    assert found.exists(), f"there is no {name} in {PLACE}; run: make tools"
    return str(found)


def output_of(name: str, *words: str | Path, cwd: Path | None = None, given: str | None = None) -> str:
    """What it prints when it reads that. Fails with that if the program does."""
    done = subprocess.run(
        [program(name), *map(str, words)],
        check=False, capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd=cwd, input=given,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
