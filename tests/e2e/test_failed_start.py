"""A start that fails after its parts have begun leaves nothing running."""

import subprocess
import sys
from pathlib import Path

import psutil

from tests.e2e.service_process import environment
from tests.patience import PATIENCE_SECONDS


def processes_of(folder: Path) -> list[str]:
    """Command lines of all processes that have this folder in them or in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            about = [*process.cmdline(), *process.environ().values()]
        except psutil.Error:
            continue  # it has ended
        if any(str(folder) in text for text in about):
            found.append(" ".join(process.cmdline()))
    return found


def test_a_start_that_cannot_write_its_address_ends_all_that_it_has_begun(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    (data_dir / "client.json").mkdir(parents=True)
    command = [sys.executable, "-m", "gpubroker_server", "serve", "--data-dir", str(data_dir), "--port", "0"]
    ended = subprocess.run(
        command,
        env=environment(PYTHONUNBUFFERED="1"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert ended.returncode != 0
    assert "client.json" in ended.stderr
    assert processes_of(data_dir) == []
