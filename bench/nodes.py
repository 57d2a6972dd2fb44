"""CPU of a leader at rest by the number of its nodes, with the real driver process and its frames.

The nodes are simulated in the driver process (`bench.many_nodes`): each sends what the agent of an idle node
sends, as often as an agent does by default. At rest no task is there. CPU time is that of the service, which
leads; that of the driver process includes the simulated agents.
"""

import json
import os
import socket
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import psutil

from bench.many_nodes import COUNT, a_node
from bench.measuring import Figure
from bench.processes import START_SECONDS, NotReady, Service, served


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000], help="how many; one run for each")
    parser.add_argument("--gpus", type=int, default=8, help="of each node")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long CPU time is counted")


def measure(options: Namespace) -> Iterator[Figure]:
    for nodes in options.nodes:
        for name, cores in at_rest(nodes, options.gpus, options.seconds)._asdict().items():
            yield Figure("nodes", f"nodes.{nodes}.{name}", cores, "cores", nodes)


class Used(NamedTuple):
    leader_cores: float
    driver_cores: float


def at_rest(nodes: int, gpus: int, seconds: float) -> Used:
    """Measure a leader at rest. Raises NotReady if not all nodes answer in time."""
    with TemporaryDirectory(prefix="gpb-bench-") as folder, socket.create_server(("127.0.0.1", 0)) as head:
        os.environ[COUNT] = str(nodes)
        settings = {
            "RAY__ADDRESS": f"127.0.0.1:{head.getsockname()[1]}",
            "SIMULATED_DEVICES": json.dumps([{"memory_mb": 81920, "count": gpus}]),
        }
        with served(Path(folder), module="bench.many_nodes", **settings) as running:
            wait_for_nodes(running, nodes)
            [driver] = (one for one in running.process.children() if "bench.many_nodes" in one.cmdline())
            began = time.monotonic()
            before = cpu_seconds(running.process), cpu_seconds(driver)
            time.sleep(seconds)
            took = time.monotonic() - began
            after = cpu_seconds(running.process), cpu_seconds(driver)
    return Used(*((now - then) / took for then, now in zip(before, after, strict=True)))


def wait_for_nodes(running: Service, nodes: int) -> None:
    """Wait until all nodes have answered, and one has told what it measures. Raises NotReady if they do not
    in time."""
    deadline = time.monotonic() + START_SECONDS
    while (there := running.ask("GET", "/stats")["nodes"]["ready"]) != nodes:
        if time.monotonic() > deadline:
            raise NotReady(f"{there} of {nodes} nodes answer")
        time.sleep(0.5)
    while running.ask("GET", f"/nodes/{a_node(0)['NodeName']}")["measured"] is None:
        if time.monotonic() > deadline:
            raise NotReady("what the nodes tell of themselves is not read")
        time.sleep(0.5)


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
