"""Writes the results in evidence/*.json into docs/explanation/reliability.md."""

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from tests.chaos.evidence import FOLDER, ROOT

PAGE = ROOT / "docs" / "explanation" / "reliability.md"
BEGIN, END = "<!-- evidence: begin -->", "<!-- evidence: end -->"
_KILLS = {"kill-sqlite": "SQLite", "kill-postgres": "PostgreSQL"}
_HEAD = """\
| kill -9 | Kills | Of Ray and runs | Tasks | Lost | Accepted twice | MiB leased twice | Per kill | Per task |
|---|---|---|---|---|---|---|---|---|"""

_OF_RAY = ("driver", "agent", "run", "shared runner", "raylet")

Record = Mapping[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """It has none."""


def command(_options: argparse.Namespace) -> None:
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The text of the page with the current evidence."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{shown()}\n{END}{after}"


def shown(folder: Path = FOLDER) -> str:
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    kills = [(name, found[file]) for file, name in _KILLS.items() if file in found]
    table = [_HEAD, *(_row(name, record) for name, record in kills)] if kills else []
    lines = [line(found[file]) for file, line in _LINES.items() if file in found]
    return "\n".join([*table, "", *(f"- {fill(line, 136, subsequent_indent='  ')}" for line in lines)])


def _row(name: str, record: Record) -> str:
    of_ray = sum(record["kills_by_kind"].get(target, 0) for target in _OF_RAY)
    bound = record["bound"]
    cells = (
        name, record["kills"], of_ray, f"{record['acknowledged']:,}", record["lost"],
        record["accepted_twice"], record["double_leased_mb"], f"< {bound['kills']:.2%}",
        f"< {bound['acknowledged']:.3%}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _tasks(record: Record) -> str:
    return (
        f"Of {record['acknowledged']:,} accepted tasks {record['lost']} were lost and "
        f"{record['accepted_twice']} accepted twice"
    )


def _by_kind(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in Counter(counts).most_common())


def _kill(record: Record) -> str:
    return (
        f"kill -9, {record['database']} ({record['runs'][0]['durability']}): "
        f"{_by_kind(record['kills_by_kind'])}. Of {record['runs_seen']:,} runs that recorded their start, "
        f"{record['started_twice']} shared a claim; {record['released_early']} leases were released while "
        f"their process was still there. {record['events']:,} events checked."
    )


def _pause_writes(record: Record) -> str:
    return (
        f"Leaders paused in the middle of a write and resumed after their lease, {record['database']}: "
        f"{record['refused']} of {record['pauses']} writes refused (< {record['bound']['pauses']:.1%})."
    )


def _pause_orders(record: Record) -> str:
    return (
        f"Late orders of such leaders, from their own Ray drivers to agents on real Ray: "
        f"{record['refused']} of {record['sent']} refused by the agent, none with an effect "
        f"(< {record['bound']['sent']:.1%}; {_by_kind(record['refused_by_kind'])})."
    )


def _shutdown(record: Record) -> str:
    seconds = {
        name: max(max(run["seconds"][name]) for run in record["runs"])
        for name in ("to_end", "without_a_leader", "to_the_next_start")
    }
    return (
        f"SIGTERM under load on real Ray: {record['stops']} processes (< {record['bound']['stops']:.1%}; "
        f"{_by_kind(record['stops_by_kind'])}). {_tasks(record)}; of {record['runs_seen']:,} runs "
        f"{record['restarted_runs']} were lost or started again. At most {seconds['to_end']:.1f} s until a "
        f"process had ended, {seconds['without_a_leader']:.2f} s without a leader, and "
        f"{seconds['to_the_next_start']:.2f} s until the next leader admitted a task."
    )


def _power_loss(record: Record) -> str:
    return (
        f"Power loss, {record['database']} ({record['durability']}): {record['images']:,} disk images "
        f"({record['different']:,} different) with {record['acknowledged']:,} accepted tasks: "
        f"{record['lost']} lost; {record['stale']} images without something that was answered "
        f"(< {record['bound']['images']:.2%}). With synchronous=NORMAL: {record['normal_stale']} of "
        f"{record['normal_images']:,} images, and {record['normal_lost']:,} of "
        f"{record['normal_acknowledged']:,} tasks."
    )


def _simulation(record: Record) -> str:
    kinds = {kind for run in record["runs"] for kind in run["faults"]}
    return (
        f"Simulation: {record['seeds']:,} seeds of {record['steps_per_seed']} steps with two or three "
        f"brokers, {record['faults']:,} faults of {len(kinds)} kinds and {record['terms']:,} terms. "
        f"{_tasks(record)}; {record['double_leased_mb']} MiB were leased twice "
        f"(< {record['bound']['seeds']:.2%} per seed, < {record['bound']['acknowledged']:.4%} per task). "
        f"{record['events']:,} events checked."
    )


def _postgres_restart(record: Record) -> str:
    return (
        f"PostgreSQL under {record['runs'][0]['offered_per_second']:g} tasks/s over HTTP: "
        f"{record['restarts']} immediate restarts and {record['backends_killed']} killed backends, in "
        f"{record['interruptions']} interruptions. {_tasks(record)}; {record['double_leased_mb']} MiB were "
        f"leased twice. After {record['recovered']} of them 95 % of the rate before was reached within five "
        f"seconds."
    )


def _network(record: Record) -> str:
    observed = [one for run in record["runs"] for one in run["observed"]]
    worst: dict[tuple[str, str], float] = {}
    for one in observed:
        for what in ("without_an_answer_seconds", "without_a_decision_seconds"):
            worst[one["kind"], what] = max(worst.get((one["kind"], what), 0.0), one[what])
    times = "; ".join(
        f"{kind} {worst[kind, 'without_an_answer_seconds']:.1f} and "
        f"{worst[kind, 'without_a_decision_seconds']:.1f} s"
        for kind in sorted({one["kind"] for one in observed})
    )
    longest = max(one["seconds"] for one in observed)
    return (
        f"Network faults of up to {longest:.0f} s, between clients and a gateway, and between a gateway, the "
        f"leader or all processes and PostgreSQL: {record['faults']} (< {record['bound']['faults']:.1%}). "
        f"{_tasks(record)}; {record['double_leased_mb']} MiB were leased twice. The longest times without an "
        f"answer of a gateway and without a decision, including the fault: {times}."
    )


def _mutation(record: Record) -> str:
    return f"Mutation: {record['found']} of {record['planted']} planted faults found by a named test."


_LINES = {
    "kill-sqlite": _kill,
    "kill-postgres": _kill,
    "pause-writes": _pause_writes,
    "pause-orders": _pause_orders,
    "shutdown": _shutdown,
    "power-loss": _power_loss,
    "simulation": _simulation,
    "postgres-restart": _postgres_restart,
    "network": _network,
    "mutation": _mutation,
}
"""File -> the sentence about it, in the order of the page."""
