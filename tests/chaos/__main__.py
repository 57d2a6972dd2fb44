"""python -m tests.chaos ...: break things on purpose, and look at what is left."""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos import blows, kills, late_orders, mutants, network, power, simulation, stops, tables, zombies
from tests.chaos.databases import DURABILITY, a_database
from tests.chaos.evidence import Evidence
from tests.chaos.faults import Fault
from tests.chaos.operations import OPERATIONS
from tests.chaos.rig import RIGS
from tests.chaos.sweep import Sweep
from tests.chaos.zombies import Zombies

SUMMED = (
    "kills", "acknowledged", "lost", "accepted_twice", "double_leased_mb", "started_twice", "released_early",
    "leases_left", "events", "runs_seen",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    commands = parser.add_subparsers(required=True)
    sweep = commands.add_parser("sweep", help="break every operation at every boundary of its statements")
    where = sweep.add_mutually_exclusive_group(required=True)
    where.add_argument("--database-url", help="of a migrated database in which nothing is")
    where.add_argument("--database", choices=sorted(DURABILITY), help="one that is made for this")
    sweep.add_argument("--operation", action="append", choices=sorted(OPERATIONS))
    sweep.add_argument("--fault", action="append", choices=[Fault.CUT.value, Fault.KILL.value])
    sweep.set_defaults(run=_sweep)
    killing = commands.add_parser("kills", help="kill -9 of processes under load, and count what is lost")
    killing.add_argument("--database", choices=sorted(DURABILITY), required=True)
    killing.add_argument("--engine", choices=sorted(RIGS), default="simulated")
    killing.add_argument("--kills", type=int, default=20)
    killing.add_argument("--tasks-per-kill", type=int, default=105)
    killing.add_argument("--seed", type=int, default=1, help="of the first batch; the next ones follow it")
    killing.add_argument(
        "--batches", type=int, default=1, help="each with a service and a database of its own"
    )
    killing.add_argument("--no-evidence", action="store_true", help="print the record and keep nothing")
    killing.set_defaults(run=_kill)
    waking = commands.add_parser(
        "zombies", help="leaders that sleep past their lease in the middle of a write, or before an order"
    )
    waking.add_argument("--pauses", type=int, default=60, help="in the middle of writes")
    waking.add_argument("--orders", type=int, default=60, help="that are sent late to agents on real Ray")
    waking.add_argument("--seed", type=int, default=1)
    waking.add_argument("--no-evidence", action="store_true", help="print the record and keep nothing")
    waking.set_defaults(run=_wake)
    _add_what_breaks_below(commands)
    _add_stops(commands)
    _add_simulation(commands)
    mutating = commands.add_parser("mutants", help="plant faults, and see which test finds each")
    mutating.add_argument("--first", type=int, help="only so many of them")
    mutating.add_argument("--no-evidence", action="store_true", help="print what was seen and keep nothing")
    mutating.set_defaults(run=_mutate)
    showing = commands.add_parser("table", help="make the table of docs/reliability.md anew")
    showing.set_defaults(run=lambda _: tables.PAGE.write_text(tables.page(), encoding="utf-8"))
    chosen = parser.parse_args()
    chosen.run(chosen)


def _add_what_breaks_below(commands: Any) -> None:
    """Power, the server, and the lines to it."""
    cutting = commands.add_parser("power-loss", help="power cuts on SQLite: what is on the disk after them")
    cutting.add_argument("--images", type=int, default=250, help="disks to look at, in each batch")
    cutting.add_argument("--seed", type=int, default=1, help="of the first batch; the next ones follow it")
    cutting.add_argument("--batches", type=int, default=1, help="each with work of its own")
    cutting.add_argument("--no-evidence", action="store_true", help="print the record and keep nothing")
    cutting.set_defaults(run=_cut_power)
    striking = commands.add_parser(
        "blows", help="restarts of PostgreSQL and kills of its backends, under load"
    )
    striking.add_argument("--restarts", type=int, default=10)
    striking.add_argument("--kills", type=int, default=100, help="of backends, ten at a blow")
    striking.add_argument("--watch-seconds", type=float, default=3.0, help="to take a rate before and after")
    striking.add_argument("--back-seconds", type=float, default=5.0, help="after which all should go on")
    striking.add_argument("--seed", type=int, default=1, help="of the first batch; the next ones follow it")
    striking.add_argument(
        "--batches", type=int, default=1, help="each with a server and a service of its own"
    )
    striking.add_argument("--no-evidence", action="store_true", help="print the record and keep nothing")
    striking.set_defaults(run=_strike)
    parting = commands.add_parser("network", help="lines on which things go wrong, under load")
    parting.add_argument("--rounds", type=int, default=1, help="of all kinds at all places")
    parting.add_argument("--kind", action="append", choices=sorted(network.KINDS))
    parting.add_argument("--place", action="append", choices=sorted(network.PLACES))
    parting.add_argument("--most-seconds", type=float, default=6.0, help="that a fault lasts")
    parting.add_argument("--rest-seconds", type=float, default=4.0, help="between two, at least")
    parting.add_argument("--seed", type=int, default=1, help="of the first batch; the next ones follow it")
    parting.add_argument(
        "--batches", type=int, default=1, help="each with a service and a database of its own"
    )
    parting.add_argument("--no-evidence", action="store_true", help="print the record and keep nothing")
    parting.set_defaults(run=_part)


def _add_stops(commands: Any) -> None:
    stopping = commands.add_parser("stops", help="gateways and brokers asked to end, under load on Ray")
    stopping.add_argument("--stops", type=int, default=20)
    stopping.add_argument("--tasks-per-stop", type=int, default=40)
    stopping.add_argument("--target", action="append", choices=sorted({*stops.TARGETS}))
    stopping.add_argument("--seed", type=int, default=1, help="of the first batch; the next ones follow it")
    stopping.add_argument("--batches", type=int, default=1, help="each with a Ray and a database of its own")
    stopping.add_argument("--no-evidence", action="store_true", help="print the record and keep nothing")
    stopping.set_defaults(run=_stop)


def _add_simulation(commands: Any) -> None:
    storming = commands.add_parser(
        "simulation",
        help="storms of faults over several brokers, each made from its seed on a clock of its own",
    )
    storming.add_argument("--seeds", type=int, default=10_000)
    storming.add_argument("--first", type=int, default=1)
    storming.add_argument("--steps", type=int, default=simulation.STEPS)
    storming.add_argument("--workers", type=int, default=1, help="processes that share the seeds")
    storming.add_argument("--most-seconds", type=float, help="begin no batch of seeds after so long")
    storming.add_argument("--no-evidence", action="store_true", help="print the record and keep nothing")
    storming.set_defaults(run=_storm)


def _sweep(chosen: argparse.Namespace) -> None:
    faults = [Fault(name) for name in chosen.fault or (Fault.CUT, Fault.KILL)]
    names = chosen.operation or OPERATIONS
    operations = {name: OPERATIONS[name] for name in names}
    if chosen.database_url is not None:
        print(Sweep(chosen.database_url).run(faults, operations))
        return
    with tempfile.TemporaryDirectory() as folder, a_database(chosen.database, Path(folder)) as url:
        print(Sweep(url).run(faults, operations))


def _wake(chosen: argparse.Namespace) -> None:
    done = [record for record in (_wake_writers(chosen), _wake_senders(chosen)) if record is not None]
    if any(record["wrong"] or record.get("accepted") for record in done):
        sys.exit(1)


def _wake_writers(chosen: argparse.Namespace) -> dict[str, Any] | None:
    """None if none are wanted, or the evidence has them."""
    evidence = Evidence("zombies", ("pauses", "refused", "accepted"), trials=("pauses",))
    if not chosen.pauses or (not chosen.no_evidence and evidence.has(seed=chosen.seed)):
        return None
    with tempfile.TemporaryDirectory() as folder, a_database("postgres", Path(folder)) as url:
        woken = Zombies(url).wake(chosen.pauses, chosen.seed)
    return _keep(chosen, evidence, zombies.record(chosen.seed, chosen.pauses, woken))


def _wake_senders(chosen: argparse.Namespace) -> dict[str, Any] | None:
    evidence = Evidence("zombies-orders", ("sleepers", "sent", "refused"), trials=("sent",))
    if not chosen.orders or (not chosen.no_evidence and evidence.has(seed=chosen.seed)):
        return None
    return _keep(chosen, evidence, late_orders.run(chosen.seed, chosen.orders))


def _keep(chosen: argparse.Namespace, evidence: Evidence, record: dict[str, Any]) -> dict[str, Any]:
    print(record, flush=True)
    if not chosen.no_evidence:
        evidence.add(record, database="postgres", durability=DURABILITY["postgres"])
    return record


def _cut_power(chosen: argparse.Namespace) -> None:
    evidence = Evidence("power-loss", power.SUMMED, trials=("images",))
    _try_each(chosen, evidence, "sqlite", lambda seed: power.run(seed, chosen.images))


def _strike(chosen: argparse.Namespace) -> None:
    trials = ("restarts", "backends_killed", "acknowledged")
    how = chosen.restarts, chosen.kills, chosen.watch_seconds, chosen.back_seconds
    evidence = Evidence("blows", blows.SUMMED, trials=trials)
    _try_each(chosen, evidence, "postgres", lambda seed: blows.run(blows.Blows(seed, *how)))


def _part(chosen: argparse.Namespace) -> None:
    most = chosen.most_seconds
    kinds, places = chosen.kind or tuple(network.KINDS), chosen.place or network.PLACES
    how = chosen.rounds, (most / 6, most / 2, most), kinds, places, chosen.rest_seconds
    evidence = Evidence("network", network.SUMMED, trials=("faults", "acknowledged"))
    _try_each(chosen, evidence, "postgres", lambda seed: network.run(network.Faults(seed, *how)))


def _stop(chosen: argparse.Namespace) -> None:
    evidence = Evidence("stops", stops.SUMMED, trials=("stops", "acknowledged"))
    how = chosen.stops, chosen.tasks_per_stop, chosen.target or stops.TARGETS
    _try_each(chosen, evidence, "postgres", lambda seed: stops.run(stops.Stops(seed, *how)))


def _try_each(
    chosen: argparse.Namespace, evidence: Evidence, database: str, run: Callable[[int], dict[str, Any]]
) -> None:
    """A batch for each seed of which there is no evidence yet; the first with something wrong is the last."""
    for seed in range(chosen.seed, chosen.seed + chosen.batches):
        if not chosen.no_evidence and evidence.has(seed=seed):
            continue
        record = run(seed)
        print(record, flush=True)
        if not chosen.no_evidence:
            evidence.add(record, database=database, durability=DURABILITY[database])
        if record["wrong"] or record.get("forgetful"):
            sys.exit(1)


def _storm(chosen: argparse.Namespace) -> None:
    simulation.with_fixed_hashes()
    evidence = Evidence("simulation", simulation.SUMMED, trials=("seeds", "acknowledged"))
    began = time.monotonic()
    end = chosen.first + chosen.seeds
    for first in range(chosen.first, end, simulation.BATCH):
        if not chosen.no_evidence and evidence.has(seed=first):
            continue
        if chosen.most_seconds is not None and time.monotonic() - began > chosen.most_seconds:
            break
        seeds = simulation.Seeds(first, min(simulation.BATCH, end - first), chosen.steps)
        record = simulation.run(seeds, chosen.workers)
        print(f"{time.monotonic() - began:.0f} s: {record}", flush=True)
        if not chosen.no_evidence:
            evidence.add(record, steps_per_seed=chosen.steps)
        if record["wrong"]:
            sys.exit(1)


def _mutate(chosen: argparse.Namespace) -> None:
    planted = mutants.MUTANTS[: chosen.first]
    if broken := mutants.unhealthy(planted):
        sys.exit(f"these fail without any mutant: {broken}")
    tried: dict[str, str] = {}
    for mutant, is_seen in mutants.try_all(planted):
        tried[mutant.name] = mutant.test if is_seen else ""
        print(f"{mutant.name}: {f'seen by {mutant.test}' if is_seen else 'NOT SEEN'}", flush=True)
    if not chosen.no_evidence:
        mutants.keep(tried)
    if not all(tried.values()):
        sys.exit(1)


def _kill(chosen: argparse.Namespace) -> None:
    evidence = Evidence(f"kills-{chosen.database}", SUMMED, trials=("kills", "acknowledged"))
    for seed in range(chosen.seed, chosen.seed + chosen.batches):
        if not chosen.no_evidence and evidence.has(seed=seed, engine=chosen.engine):
            continue
        batch = kills.Batch(chosen.database, chosen.engine, seed, chosen.kills, chosen.tasks_per_kill)
        began = time.monotonic()
        record = kills.run(batch)
        print(f"{time.monotonic() - began:.0f} s: {record}", flush=True)
        if not chosen.no_evidence:
            evidence.add(record, database=chosen.database)
        if record["wrong"]:
            sys.exit(1)


if __name__ == "__main__":
    main()
