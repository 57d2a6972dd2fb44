"""What a real Ray spills is measured."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS


@pytest.mark.provokes("object-store-spills")
def test_objects_that_ray_spills_are_measured_where_it_puts_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.e2e.spilling", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE_SECONDS, check=False)
    assert ended.stdout.splitlines()[-1:] == ["(80, 0) ['object-store-spills'] 8"], ended.stderr
