"""Memory of an idle service with its local head: the PSS of all their processes, by kind.

PSS divides a page among the processes that share it, so the sum is what the machine gets back when they end.
A second Ray on the machine shares pages with this one, and makes the figure smaller by up to 20 MiB.
"""

import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from bench.measuring import Figure, report
from bench.processes import Service, service

DEVICES = '[{"memory_mb": 81920}]'
KINDS = {
    "gpubroker_server serve": "service",
    "ray.head.supervisor": "supervisor of the head",
    "ray.driver.process": "Ray driver",
    "ray::NodeAgent": "node agent",
    "ray::Runner": "runners",
    "gcs_server": "Ray's gcs_server",
    "raylet": "Ray's raylet",
    "ray::DashboardAgent": "Ray's DashboardAgent",
    "ray::RuntimeEnvAgent": "Ray's RuntimeEnvAgent",
}
"""A part of the command line -> the kind of process that has it."""


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=30.0, help="how long it has been idle")


def measure(options: Namespace) -> Iterator[Figure]:
    with service(SIMULATED_DEVICES=DEVICES) as running:
        time.sleep(options.seconds)
        mb_by_kind = pss_mb(running)
    for kind, mb in sorted(mb_by_kind.items(), key=lambda item: -sum(item[1])):
        report(f"  {kind}: {sum(mb):.0f} MiB in {len(mb)}")
    yield figure(mb_by_kind)


def figure(mb_by_kind: Mapping[str, Sequence[float]]) -> Figure:
    processes = sum(map(len, mb_by_kind.values()))
    return Figure("idle", "idle.pss_mb", sum(map(sum, mb_by_kind.values())), "MiB", processes)


def pss_mb(running: Service) -> dict[str, list[float]]:
    """Return the PSS of each process in MiB, by kind. A process that is no part of the service has its
    command line as its kind."""
    found: dict[str, list[float]] = defaultdict(list)
    for process in processes_of(running):
        command = " ".join(process.cmdline()).strip()
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        [kib] = (int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        found[next((KINDS[part] for part in KINDS if part in command), command)].append(kib / 1024)
    return found


def processes_of(running: Service) -> list[psutil.Process]:
    """Return the service, the supervisor of its head, whose command names the data directory, and all
    processes below them."""
    named = [one for one in psutil.process_iter(["cmdline"]) if _names(one, str(running.data_dir))]
    below = [child for root in (running.process, *named) for child in root.children(recursive=True)]
    return list({one.pid: one for one in (psutil.Process(running.process.pid), *named, *below)}.values())


def _names(process: psutil.Process, text: str) -> bool:
    return any(text in word for word in process.info["cmdline"] or ())
