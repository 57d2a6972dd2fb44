"""`python -m bench idle` counts the memory of each process once."""

import sys
from pathlib import Path

import psutil
import pytest

from bench.idle import figure, pss_mb
from bench.processes import Service

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()", "ray::Runner"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print("up", flush=True)
input()
child.communicate(b"\\n")
"""


def parent(word: str) -> psutil.Popen:
    """A process with one child, both running."""
    command = [sys.executable, "-c", PARENT, word]
    process = psutil.Popen(command, stdin=-1, stdout=-1)
    assert process.stdout.readline()
    return process


def test_only_the_service_its_head_and_all_processes_below_are_counted(tmp_path: Path) -> None:
    running = Service(parent("gpubroker_server serve"), 0, "", tmp_path)
    others = [parent(f'ray.head.supervisor {{"data_dir": "{tmp_path}"}}'), parent("gcs_server")]
    try:
        found = pss_mb(running)
    finally:
        for process in (running.process, *others):
            process.communicate(b"\n")
    counted = {kind: len(mb) for kind, mb in found.items()}
    assert counted == {"service": 1, "supervisor of the head": 1, "runners": 2}
    assert all(1.0 < mb < 100.0 for of_kind in found.values() for mb in of_kind)


def test_the_figure_is_the_sum() -> None:
    found = figure({"runners": [40.0, 50.0], "service": [90.0]})
    assert (found.figure, found.n) == ("idle.pss_mb", 3)
    assert found.value == pytest.approx(180.0)
