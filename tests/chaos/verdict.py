"""The verdict on a run: what clients were answered and what processes did, compared with the database."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpubroker_server.adapters.sql.rows import event_of_row
from gpubroker_server.core.domain.task import TERMINAL
from gpubroker_server.core.world.events import Event

from tests.chaos.database import Reader
from tests.chaos.history import History
from tests.chaos.witness import Span, beyond_capacity, lines_of, spans, started_twice

_LOG = "SELECT position, at, kind, key, version, tenant, fields, reader FROM event ORDER BY 1"
_TWO_SUCCESSES = "SELECT task FROM outcome WHERE ending = 'succeeded' GROUP BY task HAVING count(*) > 1"
_SHOWN = 20
"""At most so many lines of each kind are kept."""


@dataclass
class Verdict:
    acknowledged: int = 0
    """Tasks whose client got an answer that they are accepted."""
    lost: int = 0
    """Acknowledged tasks that are not stored or have not ended."""
    accepted_twice: int = 0
    """Tasks with more than one end or success, and keys with more than one task."""
    double_leased_mb: int = 0
    """The most by which leases in the log, or running processes, exceeded a device."""
    leases_left: int = 0
    started_twice: int = 0
    """Claims under which two processes ran."""
    released_early: int = 0
    """Leases that were released while their process was still seen."""
    events: int = 0
    runs_seen: int = 0
    wrong: list[str] = field(default_factory=list)
    """In words."""

    def counts(self, *names: str) -> dict[str, int]:
        return {name: getattr(self, name) for name in names}


def judge(url: str, folder: Path, contradictions: Sequence[str], capacity_mb: int) -> Verdict:
    """`folder` holds the files that clients and processes wrote. The service has been stopped."""
    reader = Reader(url)
    events = [event_of_row(row) for row in reader.rows(_LOG)]
    history = History()
    history.read(events)
    history.end()
    acknowledged = {line["id"] for line in lines_of(folder / "answers")}
    ended = {id for id, task in history.tasks.items() if task.state in TERMINAL}
    stored = {id for (id,) in reader.rows("SELECT id FROM task WHERE finished")}
    lost = sorted(acknowledged - (ended & stored))
    ran = spans(folder / "witness", folder / "seen")
    early = _released_early(events, ran)
    twice = started_twice(ran)
    verdict = Verdict(
        acknowledged=len(acknowledged),
        lost=len(lost),
        accepted_twice=len(contradictions) + _accepted_twice(events, reader),
        double_leased_mb=max(_most_leased_twice(history), beyond_capacity(ran, capacity_mb)),
        leases_left=len(history.leases),
        started_twice=len(twice),
        released_early=len(early),
        events=len(events),
        runs_seen=len(ran),
        wrong=[*history.violations[:_SHOWN], *contradictions[:_SHOWN]],
    )
    verdict.wrong += [f"not stored or not ended: {id}" for id in lost[:_SHOWN]]
    verdict.wrong += [f"two processes under one claim: {claim}" for claim in twice[:_SHOWN]]
    verdict.wrong += [f"released while its process was seen: {lease}" for lease in early[:_SHOWN]]
    verdict.wrong += [f"never released: {key}" for key in sorted(history.leases)[:_SHOWN]]
    return verdict


def _accepted_twice(events: Sequence[Event], reader: Reader) -> int:
    terminal = {state.value for state in TERMINAL}
    ends = Counter(
        event.key for event in events if event.kind.startswith("task.") and event.fields["state"] in terminal
    )
    several_ends = {task for task, count in ends.items() if count > 1}
    return len(several_ends | {task for (task,) in reader.rows(_TWO_SUCCESSES)})


def _most_leased_twice(history: History) -> int:
    return max((device.excess_mb for device in history.devices.values()), default=0)


def _released_early(events: Sequence[Event], ran: Sequence[Span]) -> list[str]:
    """Leases whose process was seen after the log says that they were released."""
    seen = {(run.task, run.fence): run.seen_until for run in ran if run.devices}
    early = []
    for event in events:
        if event.kind == "lease.released":
            _, holder, fence, _ = event.key.split(":", 3)
            if seen.get((holder, int(fence)), 0.0) > event.at:
                early.append(event.key)
    return early
