"""When the runs of a cluster are expected to have left."""

from dataclasses import dataclass
from math import inf

from gpubroker_server.core.domain.estimates import Sketch, Topic, What
from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import part_of
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId
from gpubroker_server.core.planning.draft import Draft
from gpubroker_server.core.planning.run_estimates import Remaining, remaining_seconds, run_seconds
from gpubroker_server.core.world.ledger import Holding

LEAST_GUESS_SECONDS = 60.0
GUESS_P90 = 9.0
"""Of runs whose length may be anything, half of those that have lasted so long last as long again, and nine
in ten at most nine times as long (a Pareto distribution of exponent 1)."""


@dataclass(frozen=True, slots=True)
class Departure:
    """When a run will be gone: one in two by the first instant, nine in ten by the second."""

    p50_at: Instant
    p90_at: Instant
    n: int = 0
    """Of how many runs this speaks; 0 if it was stated, or is certain."""
    is_guess: bool = False
    """Nobody knows how long such runs take, or this one has outlasted what was known."""

    def within(self, now: Instant) -> Remaining | None:
        """None if nobody can tell."""
        if self.is_guess or self.p50_at == inf:
            return None
        return Remaining(Seconds(self.p50_at - now), Seconds(self.p90_at - now), self.n)


NEVER = Departure(Instant(inf), Instant(inf))


class Departures:
    """Of the runs in one draft, each worked out once."""

    def __init__(self, draft: Draft, policy: Policy, now: Instant, as_of: Instant | None = None) -> None:
        """`as_of`: how long runs of which that is not certain go on is judged by how long they had lasted
        then, if they had begun. Each moment that such a run lasts moves its end on, and a plan would find
        that everybody delays a forecast which was made a moment before. None: now."""
        self.draft = draft
        """May be replaced by another one of the same World."""
        self.policy = policy
        self.now = now
        self._as_of = now if as_of is None else as_of
        self._sketches = draft.world.learned.sketches
        self._known: dict[tuple[TaskId, int, TaskState], Departure] = {}
        self._learned: dict[tuple[str, str, str], Sketch | None] = {}
        """By tenant, subject and kind what is known of how long such runs take."""

    def of_holding(self, holding: Holding) -> Departure:
        """What nobody can say anything about, like a quarantined lease, never leaves."""
        run = self.draft.holder(holding.lease)
        if holding.lease.state is LeaseState.RELEASING:
            return Departure(self.now, self.now)
        if holding.lease.state is LeaseState.QUARANTINED or run is None or not run.is_active:
            return NEVER
        if run.state is not TaskState.STOPPING and holding.stopping:  # one rank of a gang that goes on
            run = part_of(run, holding.lease.rank)
        return self.of(run)

    def of(self, run: Task) -> Departure:
        """Of a run that is ADMITTED, RUNNING or STOPPING."""
        if run.state is TaskState.STOPPING:
            at = max(self.now, run.stop_deadline_at or self.now)
            return Departure(at, at)
        key = run.id, run.fence, run.state
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._work_out(run)
        return known

    def _work_out(self, run: Task) -> Departure:
        kind = self._kind_of(run)
        known = self._seconds_of(run, kind)
        at = max(self._as_of, run.started_at or run.admitted_at or self.now)
        if known is None and run.expected_seconds is None:
            return self._guessed(run, 0.0, at)
        if run.started_at is None:
            left = run_seconds(run, self._sketches, self.policy, kind=kind)
        else:
            left = remaining_seconds(run, self._sketches, at, kind=kind)
        if left is not None:
            p50_at, p90_at = at + left.p50_seconds, at + left.p90_seconds
            return self._bounded(run, p50_at, p90_at, left.n, is_guess=False)
        learned = 0.0 if known is None else known.quantile(1.0) or 0.0
        return self._guessed(run, learned if run.expected_seconds is None else run.expected_seconds, at)

    def _guessed(self, run: Task, known_seconds: float, at: Instant) -> Departure:
        """`known_seconds`: what it was thought to take at most; 0 if nothing was. `at`: as of when."""
        elapsed = 0.0 if run.started_at is None else at - run.started_at
        guess = max(LEAST_GUESS_SECONDS, elapsed - known_seconds)
        return self._bounded(run, at + guess, at + GUESS_P90 * guess, 0, is_guess=True)

    def _bounded(self, run: Task, p50_at: float, p90_at: float, n: int, *, is_guess: bool) -> Departure:
        """Whatever it would take, it is stopped at its time limit and at its deadline."""
        latest = inf
        if run.timeout_seconds is not None:
            latest = (run.started_at or self.now) + run.timeout_seconds + run.grace_seconds
        if run.deadline_at is not None and run.external is None:  # whose deadline each renewal moves on
            latest = min(latest, run.deadline_at + run.grace_seconds)
        latest = max(self.now, latest)
        return Departure(Instant(min(latest, p50_at)), Instant(min(latest, p90_at)), n, is_guess)

    def _seconds_of(self, run: Task, kind: str) -> Sketch | None:
        about = run.tenant, run.subject, kind
        if about not in self._learned:
            self._learned[about] = self._sketches.get(Topic(*about, What.SECONDS))
        return self._learned[about]

    def _kind_of(self, run: Task) -> str:
        """Of its devices, by which run times are told apart; empty if it has none."""
        known = [lease.device for lease in self.draft.world.leases_of(run)]
        if not known and run.demand.gpus and run.node is not None:  # this draft has admitted it
            known = [d for d in self.draft.given_to(run.id) if self.draft.book(d).device.node == run.node]
        if len(known) == 1:
            return self.draft.book(known[0]).device.kind
        return min((self.draft.book(device).device.kind for device in known), default="")
