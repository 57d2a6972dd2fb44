"""The part of docs/explanation/reliability.md that is generated from evidence/*.json."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from tests.chaos.evidence import FOLDER, ROOT

PAGE = ROOT / "docs" / "explanation" / "reliability.md"
BEGIN, END = "<!-- evidence: begin -->", "<!-- evidence: end -->"
_KILLS = {"kills-sqlite": "SQLite", "kills-postgres": "PostgreSQL"}
_HEAD = """\
| kill -9 | Kills | Of Ray and runs | Tasks | Lost | Accepted twice | MiB leased twice | Per kill | Per task |
|---|---|---|---|---|---|---|---|---|"""

_OF_RAY = ("driver", "agent", "run", "shared runner", "raylet")

Record = Mapping[str, Any]


def shown(folder: Path = FOLDER) -> str:
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    kills = [(name, found[file]) for file, name in _KILLS.items() if file in found]
    table = [_HEAD, *(_row(name, record) for name, record in kills)] if kills else []
    return "\n".join(
        [*table, "", *(f"- {fill(line, 136, subsequent_indent='  ')}" for line in _lines(found))]
    )


def page() -> str:
    """The page with its generated part made again."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{shown()}\n{END}{after}"


def _row(name: str, found: Record) -> str:
    by = _killed(found)
    of_ray = sum(by[target] for target in _OF_RAY)
    bound = found["bound"]
    cells = (
        name, found["kills"], of_ray, f"{found['acknowledged']:,}", found["lost"], found["accepted_twice"],
        found["double_leased_mb"], f"< {bound['kills']:.2%}", f"< {bound['acknowledged']:.3%}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _killed(found: Record) -> Counter[str]:
    return Counter(found["kills_by_kind"])


def _lines(found: Mapping[str, Record]) -> Iterator[str]:
    for file, name in _KILLS.items():
        if file in found:
            record = found[file]
            killed = ", ".join(f"{target} {count}" for target, count in _killed(record).most_common())
            yield (
                f"{name} ({record['runs'][0]['durability']}): killed {killed}. Of {record['runs_seen']:,} "
                f"runs that wrote a line at their start, {record['started_twice']} shared a claim; "
                f"{record['released_early']} leases were released while their process was alive. "
                f"{record['events']:,} events checked."
            )
    yield from _sleepers(found)
    if "stops" in found:
        yield _stops(found["stops"])
    if "power-loss" in found:
        record = found["power-loss"]
        yield (
            f"Power cuts, {record['database']} ({record['durability']}): {record['images']:,} possible disk "
            f"images after a cut ({record['different']:,} different), with {record['promised']:,} "
            f"accepted tasks: {record['lost']} lost; {record['forgetful']} images lack something that was "
            f"answered (< {record['bound']['images']:.2%}). With synchronous=NORMAL it would be "
            f"{record['normal_forgetful']} of {record['normal_images']:,} images, and "
            f"{record['normal_lost']:,} of {record['normal_promised']:,} tasks."
        )
    if "simulation" in found:
        record = found["simulation"]
        kinds = {kind for run in record["runs"] for kind in run["faults"]}
        yield (
            f"Simulation: {record['seeds']:,} storms of {record['steps_per_seed']} steps over two or three "
            f"brokers, with {record['faults']:,} faults of {len(kinds)} kinds and {record['terms']:,} terms. "
            f"Of {record['acknowledged']:,} accepted tasks {record['lost']} were lost, "
            f"{record['accepted_twice']} accepted twice; {record['double_leased_mb']} MiB leased twice "
            f"(< {record['bound']['seeds']:.2%} each, < {record['bound']['acknowledged']:.4%} per task). "
            f"{record['events']:,} events checked."
        )
    if "blows" in found:
        record = found["blows"]
        yield (
            f"PostgreSQL under {record['runs'][0]['offered_per_second']:g} tasks/s over HTTP: "
            f"{record['restarts']} crash restarts and {record['backends_killed']} ended backends, "
            f"in {record['blows']} steps. Of {record['acknowledged']:,} accepted tasks {record['lost']} were "
            f"lost, {record['accepted_twice']} accepted twice; {record['double_leased_mb']} MiB leased "
            f"twice. After {record['back']} of the steps 95 % of the earlier rate was back within 5 s."
        )
    if "network" in found:
        yield from _network(found["network"])
    if "mutants" in found:
        record = found["mutants"]
        yield f"Planted faults: {record['seen']} of {record['planted']} caught by a named test."


def _sleepers(found: Mapping[str, Record]) -> Iterator[str]:
    if "zombies" in found:
        record = found["zombies"]
        yield (
            f"Leaders stopped in mid-write and resumed after their lease had ended, {record['database']}: "
            f"{record['refused']} of {record['pauses']} writes refused (< {record['bound']['pauses']:.1%})."
        )
    if "zombies-orders" in found:
        record = found["zombies-orders"]
        ways = ", ".join(f"{way} {count}" for way, count in record["refused_by_kind"].items())
        yield (
            f"Orders that such leaders sent after they resumed, through their drivers to agents on Ray: "
            f"{record['refused']} of {record['sent']} refused by the agent, without effect "
            f"(< {record['bound']['sent']:.1%}; {ways})."
        )


def _stops(record: Record) -> str:
    stopped = ", ".join(f"{target} {count}" for target, count in record["stops_by_kind"].items())
    seconds = {
        name: max(max(run["seconds"][name]) for run in record["runs"])
        for name in ("to_end", "without_a_leader", "to_the_next_start")
    }
    return (
        f"Processes stopped by SIGTERM under load on real Ray: {record['stops']} "
        f"(< {record['bound']['stops']:.1%}; {stopped}). Of {record['acknowledged']:,} accepted tasks "
        f"{record['lost']} were lost, {record['accepted_twice']} accepted twice; of {record['runs_seen']:,} "
        f"runs {record['began_again']} started again or were lost. At most {seconds['to_end']:.1f} s until a "
        f"process had ended, {seconds['without_a_leader']:.2f} s without a leader, and "
        f"{seconds['to_the_next_start']:.2f} s until the next leader started a task."
    )


def _network(record: Record) -> Iterator[str]:
    met = [one for run in record["runs"] for one in run["met"]]
    worst: dict[tuple[str, str], float] = {}
    for one in met:
        for what in ("without_an_answer_seconds", "without_a_decision_seconds"):
            worst[one["kind"], what] = max(worst.get((one["kind"], what), 0.0), one[what])
    kinds = sorted({one["kind"] for one in met})
    times = "; ".join(
        f"{kind} {worst[kind, 'without_an_answer_seconds']:.1f} and "
        f"{worst[kind, 'without_a_decision_seconds']:.1f} s"
        for kind in kinds
    )
    longest = max(one["seconds"] for one in met)
    yield (
        "Connections made late, narrow, fragmented, half-open, reset or slow to close for up to "
        f"{longest:.0f} s, between clients and a gateway, "
        f"and between a gateway, the leader or all and PostgreSQL: "
        f"{record['faults']} faults (< {record['bound']['faults']:.1%}). Of {record['acknowledged']:,} "
        f"accepted tasks {record['lost']} were lost, {record['accepted_twice']} accepted twice; "
        f"{record['double_leased_mb']} MiB leased twice. The longest times without an answer from a "
        f"gateway and without a decision, the fault included: {times}."
    )
