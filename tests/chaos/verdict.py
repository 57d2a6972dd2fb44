"""What a run of kills comes to: what was promised over HTTP and what happened, held against the database."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpubroker_server.adapters.sql.rows import event_of_row
from gpubroker_server.core.domain.task import TERMINAL
from gpubroker_server.core.world.events import Event

from tests.chaos.history import History
from tests.chaos.rows import Answers
from tests.chaos.witness import Span, beyond_capacity, lines_of, spans, started_twice

_LOG = "SELECT position, at, kind, key, version, tenant, fields, reader FROM event ORDER BY 1"


@dataclass
class Verdict:
    acknowledged: int = 0
    """Tasks of which a client was told that they are accepted."""
    lost: int = 0
    """Of those: not there, or not at their end."""
    accepted_twice: int = 0
    """Tasks with more than one end or success, and keys with more than one task."""
    double_leased_mb: int = 0
    """The most by which leases in the log, or runs that were there, exceeded a device."""
    leases_left: int = 0
    started_twice: int = 0
    """Claims under which two processes ran."""
    released_early: int = 0
    """Leases that were released while their process was seen."""
    events: int = 0
    runs: int = 0
    wrong: list[str] = field(default_factory=list)
    """In words."""

    @property
    def is_good(self) -> bool:
        return not (
            self.lost
            or self.accepted_twice
            or self.double_leased_mb
            or self.leases_left
            or self.started_twice
            or self.released_early
            or self.wrong
        )


def judge(url: str, folder: Path, contradictions: Sequence[str], capacity_mb: int) -> Verdict:
    """`folder` holds what clients and processes wrote. The service has been stopped."""
    answers = Answers(url)
    events = [event_of_row(row) for row in answers.to(_LOG)]
    history = History()
    history.read(events)
    history.end()
    told = {line["id"] for line in lines_of(folder / "told")}
    ended = {id for id, task in history.tasks.items() if task.state in TERMINAL}
    stored = {id for (id,) in answers.to("SELECT id FROM task WHERE finished")}
    ran = spans(folder / "witness", folder / "seen")
    early = _released_early(events, ran)
    twice = started_twice(ran)
    verdict = Verdict(
        acknowledged=len(told),
        lost=len(told - (ended & stored)),
        accepted_twice=len(contradictions) + _accepted_twice(events, answers),
        double_leased_mb=max(_most_leased_twice(history), beyond_capacity(ran, capacity_mb)),
        leases_left=len(history.leases),
        started_twice=len(twice),
        released_early=len(early),
        events=len(events),
        runs=len(ran),
        wrong=[*history.violations[:20], *contradictions[:20]],
    )
    verdict.wrong += [f"not there or not ended: {id}" for id in sorted(told - (ended & stored))[:20]]
    verdict.wrong += [f"two processes under one claim: {claim}" for claim in twice[:20]]
    verdict.wrong += [f"released while it was seen: {lease}" for lease in early[:20]]
    verdict.wrong += [f"never released: {key}" for key in sorted(history.leases)[:20]]
    return verdict


def _accepted_twice(events: Sequence[Event], answers: Answers) -> int:
    ends = Counter(
        event.key
        for event in events
        if event.kind.startswith("task.") and event.fields["state"] in {state.value for state in TERMINAL}
    )
    successes = answers.to(
        "SELECT task FROM outcome WHERE ending = 'succeeded' GROUP BY task HAVING count(*) > 1"
    )
    return len({task for task, count in ends.items() if count > 1} | {task for (task,) in successes})


def _most_leased_twice(history: History) -> int:
    return max((device.excess_mb for device in history.devices.values()), default=0)


def _released_early(events: Sequence[Event], ran: Sequence[Span]) -> list[str]:
    """A process that was seen after the database had noted that its lease was released."""
    seen = {(run.task, run.fence): run.seen_until for run in ran if run.devices}
    early = []
    for event in events:
        if event.kind == "lease.released":
            _, holder, fence, _ = event.key.split(":", 3)
            if seen.get((holder, int(fence)), 0.0) > event.at:
                early.append(event.key)
    return early
