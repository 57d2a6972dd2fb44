"""python -m tests.simulation --seed 7 --hours 24: replay a day and print what happened in it."""

import argparse
import time

from tests.simulation.day import DayReport, replay


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--hours", type=float, default=24.0)
    chosen = parser.parse_args()
    began = time.monotonic()
    report = replay(chosen.seed, chosen.hours)
    print(text_of(report, time.monotonic() - began))


def text_of(report: DayReport, seconds: float) -> str:
    count = report.counts
    rows = {
        "tasks": f"{report.submitted} accepted, {report.refused} refused at the door",
        "ends": ", ".join(
            f"{count[f'task.{end}']} {end}" for end in ("succeeded", "failed", "cancelled", "expired")
        ),
        "claims": f"{count['task.admitted']} ({count['task.requeued']} went back to the queue)",
        "pledges": ", ".join(
            f"{count[f'pledge.{what}']} {what}"
            for what in ("made", "consumed", "withdrawn", "taken", "dissolved")
        ),
        "leases": f"{count['lease.reserved']} made, {count['lease.quarantined']} quarantined, "
        f"{count['lease.released']} released",
        "leaders": f"{report.terms} terms",
        "drained": f"{report.drained_after_hours:.1f} h after the last arrival",
        "events": f"{sum(count.values())}, digest {report.digest[:16]}",
    }
    head = f"seed {report.seed}, {report.hours:g} h, every rule held at every step ({seconds:.0f} s)"
    return "\n".join([head, *(f"  {name:8} {text}" for name, text in rows.items())])


if __name__ == "__main__":
    main()
