"""Wall time of thousands of short tasks in queues with quotas, through the whole service.

Every task is a POST of its own, durable before its answer; admissions, starts and ends are commits too. Runs
only sleep for their run time. The loads are Kueue's performance tests, whose published figures include a
Kubernetes API server; ours include HTTP and a durable database.
"""

import json
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping, Sequence

from msgspec import to_builtins
from msgspec.structs import replace

from bench.child_process import ChildProcess
from bench.churn.outcome import Outcome, events_of, outcome_of
from bench.churn.shapes import SHAPES, UNIT_MB, Shape
from bench.deployment import postgres
from bench.measuring import Figure, report
from bench.processes import SQLITE_DURABILITY, Service, service

PUBLISHED = "Kueue's and includes a Kubernetes API server; ours includes HTTP and a durable database"
POLL_SECONDS = 0.5
OPEN = ("pending", "admitted", "running", "stopping")


class Sender(ChildProcess):
    module = "bench.churn.sender"

    def send(self, shape: Shape, port: int, tokens: Sequence[str], connections: int) -> float:
        """Submit all tasks and return the seconds from the first submit to the last answer. `tokens` has one
        token per queue, cohort by cohort. Raises RuntimeError if a task was not accepted."""
        answer = self.ask(shape=to_builtins(shape), port=port, tokens=tokens, connections=connections)
        if answer["statuses"] != {"202": shape.tasks}:
            raise RuntimeError(f"{shape.tasks} tasks had to be accepted; answers were {answer['statuses']}")
        return float(answer["seconds"])


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="kueue-baseline", help="the load")
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite", help="of the service")
    parser.add_argument("--connections", type=int, default=64, help="of the client")
    parser.add_argument(
        "--share", type=_share, default=1.0, help="submit only this share of each queue's tasks (0 to 1)"
    )


def _share(text: str) -> float:
    share = float(text)
    if not 0.0 < share <= 1.0:
        raise ArgumentTypeError(f"share {text} is out of range: more than 0 and at most 1")
    return share


def measure(options: Namespace) -> Iterator[Figure]:
    shape = SHAPES[options.shape].shortened(options.share)
    report(f"{shape.name}: {shape.tasks:,} tasks in {shape.cohorts * shape.queues:,} queues")
    report(f"  a published figure is {PUBLISHED}")
    if options.database == "sqlite":
        yield from figures(shape, churn(shape, options.connections), SQLITE_DURABILITY)
    else:
        with postgres() as (url, durability):
            outcome = churn(shape, options.connections, DATABASE_URL=url)
        yield from figures(shape, outcome, durability)


def figures(shape: Shape, outcome: Outcome, durability: str) -> Iterator[Figure]:
    """Yield the figures, each with its published value as the baseline if there is one. Waits are means per
    class."""
    prefix = f"churn.{shape.name.rpartition('-')[2]}"
    for name, (value, unit) in outcome.figures(shape).items():
        figure = Figure("churn", f"{prefix}.{name}", value, unit, shape.tasks, durability)
        baseline = shape.published.get(name)
        if baseline is None:
            yield figure
        else:
            yield replace(figure, baseline=baseline, ratio=value / baseline, published=PUBLISHED)


def churn(shape: Shape, connections: int, **settings: str) -> Outcome:
    """Run the load on an empty service until every task has ended."""
    with service(**settings_for(shape), **settings) as running, Sender() as sender:
        tokens = [_token(running, queue) for queue in range(shape.cohorts * shape.queues)]
        began, cpu = time.monotonic(), sum(running.process.cpu_times()[:2])
        took = sender.send(shape, running.port, tokens, connections)
        report(f"  every task accepted after {took:.1f} s")
        while any((counts := running.ask("GET", "/stats")["tasks"])[state] for state in OPEN):
            waiting = sum(counts[state] for state in OPEN)
            report(f"  {time.monotonic() - began:6.1f} s: {shape.tasks - waiting:,} ended, {waiting:,} to go")
            time.sleep(POLL_SECONDS)
        cpu = sum(running.process.cpu_times()[:2]) - cpu
        report("  every task ended; reading the log")
        return outcome_of(events_of(running, 0), shape, cpu)


def settings_for(shape: Shape) -> Mapping[str, str]:
    cohorts = [f"cohort-{number}" for number in range(shape.cohorts)]
    quota = {"guaranteed_mb": shape.quota * UNIT_MB, "borrow_mb": shape.borrow * UNIT_MB}
    tenants = {
        f"queue-{cohort * shape.queues + queue}": {"cohort": name, **quota}
        for cohort, name in enumerate(cohorts)
        for queue in range(shape.queues)
    }
    device_mb = shape.queues * shape.quota * UNIT_MB
    return {
        "ENGINE": "simulated",
        "SIMULATED_DEVICES": json.dumps([{"kind": name, "memory_mb": device_mb} for name in cohorts]),
        "POLICY__TENANTS": json.dumps(tenants),
        "POOLS": json.dumps({name: {"kinds": [name]} for name in cohorts}),
        "RAY__MAX_RUNS": str(shape.units),
        "ENTRYPOINTS": "bench.tasks:*",
    }


def _token(running: Service, queue: int) -> str:
    asked = {"name": f"queue-{queue}", "tenant": f"queue-{queue}", "scopes": ["tasks:write", "tasks:read"]}
    return str(running.ask("POST", "/tokens", asked)["token"])
