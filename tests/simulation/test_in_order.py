"""Whatever is decided depends on what happened, and not on the process in which that is worked out."""

import os
import subprocess
import sys


def test_decisions_and_where_slices_end_depend_on_no_order_of_sets() -> None:
    """Each process walks its sets in an order of its own, by the seed with which it hashes names."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.simulation.in_order"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate()[0].splitlines() for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert len(first) > 1000
    assert first == second
