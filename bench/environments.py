"""The price of an environment: what a cached one adds to a run, and a first build beside `uv sync` alone.

Runs with and without an environment take turns, so that both see the same machine. Builds install the same
packages from the same kind of cache of downloads: empty for the first, then full. `uv sync` makes a project's
environment; the service is measured from the submit to the start order of the run that waited for the build.
"""

import os
import subprocess
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import uv
from gpubroker import Broker

from bench.measuring import Figure, report
from bench.processes import Service, service

DEVICES = '[{"memory_mb": 1024}]'
PROJECT = """[project]
name = "bench"
version = "0"
requires-python = ">=3.11"
dependencies = [{packages}]
"""


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=40, help="runs of each kind")
    parser.add_argument("--builds", type=int, default=5, help="builds with a full cache of downloads")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds before each run")
    parser.add_argument("--packages", nargs="+", default=["numpy", "pandas", "requests"])


def measure(options: Namespace) -> Iterator[Figure]:
    with service(SIMULATED_DEVICES=DEVICES, RAY__SPARES="3") as running:
        yield from _builds(running, options)
        yield from _cached(running, options)


def _builds(running: Service, options: Namespace) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="gpb-uv-") as folder:
        # A version of a small package in each makes another environment of the same size.
        pairs = []
        for minor in range(10, 11 + options.builds):
            project = _project(Path(folder) / str(minor), [*options.packages, f"six==1.{minor}.0"])
            pairs.append((_sync(project, Path(folder) / "cache"), _built(running, project)))
    for alone, ours in pairs:
        report(f"  uv sync {alone:.2f} s, submit to start {ours:.2f} s")
    cold, warm = pairs[0], pairs[1:]
    yield Figure("environments", "environments.first_build.over_bound_s", _over(*cold), "s", 1)
    over = median(_over(*pair) for pair in warm)
    yield Figure("environments", "environments.build.over_bound_s", over, "s", len(warm))


def _over(alone: float, ours: float) -> float:
    """Return by how many seconds a build takes longer than 1.15 of `uv sync` and half a second."""
    return ours - (1.15 * alone + 0.5)


def _project(directory: Path, packages: list[str]) -> Path:
    """Make a project with a lock file, and return its directory."""
    directory.mkdir()
    text = PROJECT.format(packages=", ".join(f'"{package}"' for package in packages))
    (directory / "pyproject.toml").write_text(text)
    _uv("lock", "--project", str(directory))
    return directory


def _uv(*words: str, **env: str) -> None:
    subprocess.run((uv.find_uv_bin(), "--quiet", *words), check=True, env={**os.environ, **env})


def _sync(project: Path, cache: Path) -> float:
    began = time.monotonic()
    words = ("sync", "--frozen", "--no-install-project", "--project", str(project))
    _uv(*words, UV_CACHE_DIR=str(cache), UV_SYSTEM_CERTS="1")
    return time.monotonic() - began


def _built(running: Service, project: Path) -> float:
    with Broker(f"http://127.0.0.1:{running.port}", running.token) as broker:
        task = broker.submit(["true"], environment=project, cpu=0.1)
        broker.result(task, timeout_seconds=600)
        phases = broker.get(task).phases
    assert phases is not None
    return phases.queued_seconds + phases.admitted_seconds


def _cached(running: Service, options: Namespace) -> Iterator[Figure]:
    environment = {"requirements": ["six"]}
    command: Mapping[str, Any] = {"run": {"command": ["true"]}}
    entrypoint: Mapping[str, Any] = {"run": {"entrypoint": "bench.tasks:noop"}, "env": {"OWN": "1"}}
    for name, body in {"command": command, "entrypoint": entrypoint}.items():
        plain, within = [], []
        for _ in range(options.runs):
            plain.append(_seconds(running, body, options.pause))
            within.append(_seconds(running, {**body, "environment": environment}, options.pause))
        added = median(mine - other for mine, other in zip(within[1:], plain[1:], strict=True))
        report(f"  {name}: {median(plain):.3f} s, in an environment {median(within[1:]):.3f} s")
        yield Figure("environments", f"environments.{name}.added_ms", 1000 * added, "ms", options.runs)


def _seconds(running: Service, body: Mapping[str, Any], pause_seconds: float) -> float:
    """Return the time from the submit to the result, once enough blank processes have been started."""
    time.sleep(pause_seconds)
    began = time.monotonic()
    task = running.ask("POST", "/tasks", body, prefer="wait=60")
    assert task["state"] == "succeeded", task
    return time.monotonic() - began
