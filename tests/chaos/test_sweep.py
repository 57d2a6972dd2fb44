"""No boundary of a statement or a COMMIT, of any operation, is one at which something can be lost."""

import subprocess
import sys
from pathlib import Path

import pytest
from gpubroker_server.adapters.sql.store import migrate

SECONDS = 1200


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("name", ["sqlite", "postgres"])
def test_nothing_is_lost_or_half_at_any_boundary_of_any_operation(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """In a process of its own, which forks: nothing else must be going on in it."""
    if name == "sqlite":
        url = f"sqlite:///{tmp_path / 'gpubroker.db'}"
        migrate(url, "head")
    else:
        url = request.getfixturevalue("postgres_url")
    command = [sys.executable, "-m", "tests.chaos", "sweep", "--database-url", url]
    swept = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    print(swept.stdout)
    assert swept.returncode == 0, swept.stderr[-4000:]
    assert "cut at " in swept.stdout
    assert "kill at " in swept.stdout
