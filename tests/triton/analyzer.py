"""Triton's own load generator, in C++, from the wheel of its Python client."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.triton.server import HOME, wheel

TRIES = 4
TRY_SECONDS = 60.0
"""On a busy machine it hangs before its first request, one time in six with 16 clients and Triton alone."""


def analyzer_libraries(folder: Path) -> Path:
    """The two that it misses, which the server's wheel brings under longer names."""
    folder.mkdir(exist_ok=True)
    for name, pattern in (("libb64.so.0d", "libb64-*.so.0d"), ("libcudart.so.12", "libcudart-*.so.12*")):
        [found] = Path(wheel()["libraries"]).glob(pattern)
        (folder / name).symlink_to(found)
    return folder


def analyzed(libraries: Path, told: Path, *options: str) -> Sequence[dict[str, Any]]:
    """Its requests; `told` is a file that is not there yet. Raises RuntimeError with what it said."""
    command = [str(HOME / "bin" / "perf_analyzer"), *options, "--profile-export-file", str(told)]
    env = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    for _ in range(TRIES):
        try:
            ran = subprocess.run(
                command, check=False, env=env, capture_output=True, text=True, timeout=TRY_SECONDS
            )
        except subprocess.TimeoutExpired:
            continue
        if ran.returncode:
            raise RuntimeError(f"perf_analyzer ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}")
        [experiment] = json.loads(told.read_text())["experiments"]
        requests: Sequence[dict[str, Any]] = experiment["requests"]
        return requests
    raise RuntimeError(f"perf_analyzer did not end within {TRY_SECONDS:g} s, {TRIES} times: {command}")
