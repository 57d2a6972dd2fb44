"""A map over many short items, and verifications on one and two workers, compared with plain Ray.

`items`: one array against `ray.util.multiprocessing.Pool` and against plain Ray tasks of 100 ms each, on a
second Ray with as many processes, which are warm. `verify`: how much faster two workers are than one, against
the same of plain Ray tasks. An item takes CPU time, not only time. The sides take turns.
"""

import json
import secrets
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from statistics import median

from bench.child_process import ChildProcess
from bench.deployment import Deployment, add_variants, deployed, prefix_of, variants_of
from bench.measuring import Figure, Pair, compared, report

CHUNK_MS = 100.0
POLL_SECONDS = 0.02


class PlainMaps(ChildProcess):
    module = "bench.plain_maps"

    def environment(self) -> dict[str, str]:
        """The token of this Ray, set before Ray is imported: it is protected like the service's Ray."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def seconds(self, how: str, items: int, ms: float, processes: int) -> float:
        chunk = max(1, round(CHUNK_MS / ms))
        return float(self.ask(how=how, items=items, ms=ms, processes=processes, chunk=chunk))


def add_options(parser: ArgumentParser) -> None:
    add_variants(parser)
    parser.add_argument("--items", type=int, default=100_000, help="items of --ms")
    parser.add_argument("--ms", type=float, default=1.0, help="CPU time of an item")
    parser.add_argument("--verifications", type=int, default=2_000, help="of 20 ms; 0 leaves them out")
    parser.add_argument("--workers", type=int, default=2, help="workers, and processes of plain Ray")
    parser.add_argument("--rounds", type=int, default=3, help="rounds to measure")


def measure(options: Namespace) -> Iterator[Figure]:
    settings = {
        "ENTRYPOINTS": "bench.tasks:*",
        "RAY__SPARES": str(options.workers),
        "SIMULATED_DEVICES": json.dumps([{"memory_mb": 1024}]),
    }
    for variant in variants_of(options):
        with deployed(variant, **settings) as running, PlainMaps() as plain:
            seconds_of_array(running, options.workers, 1.0, options.workers)
            if options.items:
                yield from items_against_ray(running, variant, plain, options)
            if options.verifications:
                yield verify_efficiency(running, variant, plain, options)


def items_against_ray(
    running: Deployment, variant: str, plain: PlainMaps, options: Namespace
) -> Iterator[Figure]:
    pairs: dict[str, list[Pair]] = {"pool": [], "tasks": []}
    items, ms, workers = options.items, options.ms, options.workers
    for how in pairs:
        plain.seconds(how, workers, 1.0, workers)  # so that the processes exist
    for number in range(1, options.rounds + 1):
        before = seconds_of_array(running, items, ms, workers)
        took = {how: plain.seconds(how, items, ms, workers) for how in pairs}
        ours = items / ((before + seconds_of_array(running, items, ms, workers)) / 2)
        for how, seconds in took.items():
            pairs[how].append(Pair(ours, items / seconds))
        theirs = ", ".join(f"{how} {items / seconds:,.0f}/s" for how, seconds in took.items())
        report(f"  {variant} round {number}: {ours:,.0f} items/s, {theirs}")
    for how, rounds in pairs.items():
        name = f"{prefix_of('array', variant)}.items_{ms:g}ms.{how}"
        n = 2 * items * options.rounds
        yield compared("array", name, "items/s", rounds, n, running.durability)


def verify_efficiency(running: Deployment, variant: str, plain: PlainMaps, options: Namespace) -> Figure:
    """Measure the efficiency of two workers: the time on one worker divided by twice the time on two."""
    n, rounds = options.verifications, options.rounds
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(1, rounds + 1):
        alone = seconds_of_array(running, n, 20.0, 1)
        ours.append(alone / (2 * seconds_of_array(running, n, 20.0, 2)))
        theirs.append(plain.seconds("tasks", n, 20.0, 1) / (2 * plain.seconds("tasks", n, 20.0, 2)))
        report(f"  {variant} round {number}: efficiency {ours[-1]:.3f}, plain Ray {theirs[-1]:.3f}")
    ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
    name = f"{prefix_of('array', variant)}.verify.efficiency"
    return Figure("array", name, median(ours), "", 2 * n * rounds, running.durability, median(theirs), ratio)


def seconds_of_array(running: Deployment, items: int, ms: float, workers: int) -> float:
    """Return the seconds from the POST until the last result is stored."""
    gateway = running.gateways[0]
    began = time.perf_counter()
    array = gateway.ask(
        "POST",
        "/arrays",
        {
            "run": {"entrypoint": "bench.tasks:spin", "args": [ms]},
            "items": list(range(items)),
            "max_parallel": workers,
            "resources": {"cpu": 1},
        },
    )
    while (answer := gateway.ask("GET", f"/arrays/{array['id']}"))["state"] in ("pending", "running"):
        time.sleep(POLL_SECONDS)
    seconds = time.perf_counter() - began
    if answer["state"] != "succeeded":
        raise RuntimeError(f"array {array['id']} {answer['state']}: {answer['failed']} items failed")
    wait_for_workers(running, answer["workers"])
    return seconds


def wait_for_workers(running: Deployment, workers: Sequence[dict[str, str]]) -> None:
    for worker in workers:
        running.gateways[0].wait_until(worker["id"], "succeeded")
