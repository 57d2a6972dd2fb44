"""A stateful model test of the store: random calls, cut at random statements, compared with a few dicts."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from gpubroker_server.adapters.sql import database
from gpubroker_server.adapters.sql.store import SqlStore
from gpubroker_server.bootstrap.follower import fill
from gpubroker_server.core.domain.decisions import AuditNote, Decision, Request, write_move
from gpubroker_server.core.domain.leader_term import LeaderRow
from gpubroker_server.core.domain.lease import Lease, LeaseState, Proof, move_lease, quarantine, release
from gpubroker_server.core.domain.policy import Cutoffs
from gpubroker_server.core.domain.submission import BatchSubmission, SubmitOutcome, SubmitVerdict
from gpubroker_server.core.domain.task import Move, Task, TaskState
from gpubroker_server.core.domain.units import Instant, Position, Seconds, TaskId, Term
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import CommitVerdict, StaleTerm, StoreUnavailable, TokenRow
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_device, a_task
from tests.chaos.database import Checker, Reader, picture_of
from tests.chaos.faults import Fault, FaultPoint
from tests.chaos.sweep import with_faults
from tests.contracts.scenes import a_submission, admission, end, node_seen, picture

T = TypeVar("T")

MEMORY_MB = 80 * GIB
TTL = Seconds(3600.0)
LATER, NEVER = Instant(NOW + 1e12), Instant(0.0)
ALL = Position(10**9)
PICKS = st.integers(0, 20)
CUTS = st.one_of(st.none(), st.none(), st.none(), st.integers(0, 12))
"""The boundary at which the connection is cut, counted from the beginning of the call; mostly none."""
ACTIONS = (
    "admit",
    "admit",
    "start",
    "start",
    "checkpoint",
    "succeed",
    "fail",
    "requeue",
    "release",
    "quarantine",
    "attest",
)


@dataclass
class Model:
    """What must be stored."""

    tasks: dict[TaskId, Task] = field(default_factory=dict)
    keys: dict[str, tuple[TaskId, str]] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    requests: set[str] = field(default_factory=set)
    tokens: dict[str, str] = field(default_factory=dict)
    term: Term = Term(0)
    all_ids: set[TaskId] = field(default_factory=set)

    def submit(self, first: Task, others: list[Task], key: str | None, body: str) -> SubmitOutcome:
        if key is not None and key in self.keys:
            known, known_body = self.keys[key]
            if known_body != body:
                return SubmitOutcome(SubmitVerdict.KEY_REUSED, known)
            if known != first.id:
                return SubmitOutcome(SubmitVerdict.DUPLICATE, known)
        if first.id not in self.tasks:
            self.tasks |= {task.id: task for task in (first, *others)}
            self.all_ids |= {task.id for task in (first, *others)}
            if key is not None:
                self.keys[key] = (first.id, body)
        return SubmitOutcome(SubmitVerdict.ACCEPTED, first.id)

    def judge(self, decision: Decision) -> CommitVerdict:
        rows = {write.task.id: write.task.version - 1 for write in decision.tasks}
        if any(id not in self.tasks or self.tasks[id].version != seen for id, seen in rows.items()):
            return CommitVerdict.STALE
        versions = {key: lease.version for key, lease in self.leases.items()}
        if any(versions.get(lease.key, 0) != lease.version - 1 for lease in decision.leases):
            return CommitVerdict.STALE
        new_mb = sum(lease.mb for lease in decision.leases if lease.version == 1)
        return CommitVerdict.COMMITTED if self.used_mb() + new_mb <= MEMORY_MB else CommitVerdict.REFUSED

    def commit(self, decision: Decision) -> None:
        self.tasks |= {write.task.id: write.task for write in decision.tasks}
        self.leases |= {lease.key: lease for lease in decision.leases}
        self.requests -= set(decision.requests_done)

    def used_mb(self) -> int:
        return sum(lease.mb for lease in self.leases.values() if lease.state is not LeaseState.RELEASED)

    def live_of(self, task: TaskId) -> list[Lease]:
        mine = (lease for lease in self.leases.values() if lease.holder == task)
        return [lease for lease in mine if lease.state is not LeaseState.RELEASED]

    def prune(self) -> None:
        """Remove ended tasks with their keys."""
        ended = {id for id, task in self.tasks.items() if task.is_terminal and not self.live_of(id)}
        self.tasks = {id: task for id, task in self.tasks.items() if id not in ended}
        self.keys = {key: known for key, known in self.keys.items() if known[0] not in ended}


def decided(model: Model, action: str, task: Task, mb: int) -> Decision | None:
    """A leader's decision for this task; None if the action is impossible now."""
    live = model.live_of(task.id)
    is_active = task.state in (TaskState.ADMITTED, TaskState.RUNNING)
    now = Instant(NOW)

    def moved(to: LeaseState, *of: LeaseState) -> tuple[Lease, ...]:
        return tuple(move_lease(lease, to) for lease in live if lease.state in of)

    def freed(state: LeaseState, proof: Proof) -> tuple[Lease, ...]:
        return tuple(release(lease, proof) for lease in live if lease.state is state)

    held = (LeaseState.RESERVED, LeaseState.HELD)
    match action:
        case "admit" if task.state is TaskState.PENDING:
            return admission(task, mb)
        case "start" if task.state is TaskState.ADMITTED:
            writes = (write_move(task, Move.STARTED, started_at=now),)
            return Decision(task.id, "started", tasks=writes, leases=moved(LeaseState.HELD, held[0]))
        case "checkpoint" if is_active:
            return Decision(
                task.id, "checkpointed", tasks=(write_move(task, Move.CHANGED, checkpoint_at=now),)
            )
        case "succeed" if is_active:
            return replace(end(task), leases=moved(LeaseState.RELEASING, *held))
        case "fail" | "requeue" if is_active:
            changes: dict[str, Any] = {"finished_at": now} if action == "fail" else {"node": None}
            what = Move.FAILED if action == "fail" else Move.REQUEUED
            writes = (write_move(task, what, **changes),)
            return Decision(task.id, action, tasks=writes, leases=moved(LeaseState.RELEASING, *held))
        case "release" if not is_active:
            return _of(task, freed(LeaseState.RELEASING, Proof.PROCESS_ABSENT))
        case "quarantine":
            return _of(task, tuple(quarantine(x, now) for x in live if x.state is LeaseState.RELEASING))
        case "attest":
            attested = _of(task, freed(LeaseState.QUARANTINED, Proof.STATEMENT))
            note = AuditNote(now, "default", "olga", "lease.attested", task.id, "off")
            return None if attested is None else replace(attested, audit=(note,))
        case _:
            return None


def _of(task: Task, leases: tuple[Lease, ...]) -> Decision | None:
    return Decision(task.id, "leases", leases=leases) if leases else None


class StoreMachine(RuleBasedStateMachine):
    """One database, used by one process after another."""

    fresh: ClassVar[Callable[[], str]]
    """Creates an empty database with the current schema; returns its URL."""

    @initialize()
    def begin(self) -> None:
        self.model, self.fault_point = Model(), FaultPoint()
        self.url = type(self).fresh()
        self.runner = asyncio.Runner()
        self.reader = Reader(self.url)
        self.checker = Checker(self.reader)
        self.checker.may_be_pruned = True
        self.count = self.old = 0
        self._open()
        self._take(self._do(self.store.leader()))
        self._do(self.store.commit(self.model.term, [node_seen(a_device(mb=MEMORY_MB))]))

    # Gateways

    @rule(
        number=st.integers(0, 8), key=st.sampled_from((None, "a", "b")), body=st.sampled_from("xy"), cut=CUTS
    )
    def submit(self, number: int, key: str | None, body: str, cut: int | None) -> None:
        """Some ids come twice, as from a gateway that did not get an answer."""
        task = a_task(f"t{number}", gpu_mb=10 * GIB)
        if task.id in self.model.all_ids:
            key, task = None, replace(task, id=self._new_id()) if key is None else task
        is_repeated = task.id in self.model.all_ids
        if is_repeated and self._key_of(task.id) is None:
            return
        named = self._key_of(task.id) if is_repeated else (key, body)
        assert named is not None
        answer = self._ask(self.store.submit(a_submission(task, *named, labels={"n": "1"})), cut)
        if answer is not None:
            assert answer == self.model.submit(task, [], *named)

    @rule(count=st.integers(1, 3), key=st.sampled_from((None, "a", "c")), cut=CUTS)
    def submit_a_batch(self, count: int, key: str | None, cut: int | None) -> None:
        tasks = [a_task(self._new_id(), gpu_mb=10 * GIB) for _ in range(count)]
        batch = BatchSubmission([a_submission(task) for task in tasks], key, "batch", "[]")
        answer = self._ask(self.store.submit_batch(batch), cut)
        if answer is not None:
            assert answer == self.model.submit(tasks[0], tasks[1:], key, "batch")

    @precondition(lambda self: self.model.tasks)
    @rule(pick=PICKS, cut=CUTS)
    def ask_to_cancel(self, pick: int, cut: int | None) -> None:
        """The same request twice counts once."""
        task = self._pick(pick)
        request = Request(f"r{self.count}", task.id, "default", "cancel", {}, Instant(NOW))
        self.count += 1
        if self._ask(self._once(self.store.request(request)), cut) is not None:
            self.model.requests.add(request.id)
            self._do(self.store.request(request))

    @rule(name=st.sampled_from("pq"), secret=st.sampled_from("12"), cut=CUTS)
    def put_a_token(self, name: str, secret: str, cut: int | None) -> None:
        secret = f"{name}{secret}"  # two tokens never have one hash
        token = TokenRow(name, "default", ("*",), 100, sha256=secret, created_at=Instant(NOW))
        answer = self._ask(self.store.put_token(token, by="olga"), cut)
        if answer is not None:
            assert answer is (self.model.tokens.setdefault(name, secret) == secret)

    @rule(name=st.sampled_from("pq"), cut=CUTS)
    def drop_a_token(self, name: str, cut: int | None) -> None:
        answer = self._ask(self.store.drop_token(name, by="olga"), cut)
        if answer is not None:
            assert answer is (self.model.tokens.pop(name, None) is not None)

    # Leaders

    @rule(
        what=st.lists(
            st.tuples(st.sampled_from(ACTIONS), PICKS, st.sampled_from((10, 30, 60)), st.integers(0, 9)),
            min_size=1,
            max_size=3,
        ),
        cut=CUTS,
    )
    def commit(self, what: list[tuple[str, int, int, int]], cut: int | None) -> None:
        """A few decisions; some are made from an outdated row."""
        decisions: dict[TaskId, Decision] = {}
        for action, pick, gib, luck in what if self.model.tasks else ():
            task = self._pick(pick)
            decision = decided(self.model, action, task, gib * GIB)
            if decision is not None and task.id not in decisions:
                decisions[task.id] = _outdated(decision) if luck == 0 else decision
        if not decisions:
            return
        verdicts = self._ask(self.store.commit(self.model.term, list(decisions.values())), cut) or ()
        for decision, verdict in zip(decisions.values(), verdicts, strict=False):
            if cut is None or verdict is not CommitVerdict.UNAVAILABLE:
                assert verdict is self.model.judge(decision), decision
            if verdict is CommitVerdict.COMMITTED:
                self.model.commit(decision)

    @precondition(lambda self: self.model.requests)
    @rule(cut=CUTS)
    def settle_requests(self, cut: int | None) -> None:
        done = Decision("", "settled", requests_done=tuple(sorted(self.model.requests)))
        if self._ask(self.store.commit(self.model.term, [done]), cut) == [CommitVerdict.COMMITTED]:
            self.model.commit(done)

    @precondition(lambda self: self.old)
    @rule(pick=PICKS, what=st.sampled_from(("commit", "renew", "prune")))
    def a_leader_of_an_older_term_writes(self, pick: int, what: str) -> None:
        term = Term(self.old)
        calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "commit": lambda: self.store.commit(term, [node_seen(a_device("gpu9"))]),
            "renew": lambda: self.store.renew(term, TTL),
            "prune": lambda: self.store.prune(term, Cutoffs(LATER, LATER, NEVER, NEVER, ALL)),
        }
        try:
            self._do(calls[what]())
        except StaleTerm:
            return
        raise AssertionError(f"a leader of term {term} was allowed to {what}")

    @rule(sees_an_old_row=st.booleans(), cut=CUTS)
    def take_the_term(self, sees_an_old_row: bool, cut: int | None) -> None:
        row = self._do(self.store.leader())
        assert row.term == self.model.term
        self._take(replace(row, term=Term(row.term - 1)) if sees_an_old_row else row, cut)

    @rule(cut=CUTS, resigns=st.booleans())
    def renew_or_resign(self, cut: int | None, resigns: bool) -> None:
        call = self.store.resign(self.model.term) if resigns else self.store.renew(self.model.term, TTL)
        if self._ask(self._once(call), cut) is not None:
            assert self._do(self.store.leader()).is_past is resigns

    @rule(cut=CUTS)
    def prune(self, cut: int | None) -> None:
        self.check()
        if self._ask(
            self._once(self.store.prune(self.model.term, Cutoffs(LATER, LATER, NEVER, NEVER, ALL))), cut
        ):
            self.model.prune()

    @rule()
    def restart(self) -> None:
        self._do(self.store.close())
        self._open()

    # Invariants

    @rule()
    def check(self) -> None:
        """Rows, log, model, and the World of a listener agree."""
        wrong = self._do(self.checker.check(self.store))
        assert wrong == []
        self._do(self._caught_up())
        assert picture(self.world) == self._do(picture_of(self.store))
        known = dict(self.reader.rows("SELECT id, version FROM task"))
        assert known == {task.id: task.version for task in self.model.tasks.values()}
        live = {lease.key: lease.state for lease in self.world_leases() if lease.state is not None}
        expected = {
            key: x.state for key, x in self.model.leases.items() if x.state is not LeaseState.RELEASED
        }
        assert live == expected
        assert set(self.world.requests) == self.model.requests
        assert {t.name: t.sha256 for t in self._do(self.store.tokens())} == self.model.tokens
        assert self._do(self.store.leader()).term == self.model.term

    def world_leases(self) -> list[Lease]:
        return [lease for claim in self.world.leases.values() for lease in claim.values()]

    def teardown(self) -> None:
        if hasattr(self, "store"):
            try:
                self.check()
            finally:
                self._do(self.store.close())
                self.reader.close()
                self.runner.close()

    # Helpers

    def _open(self) -> None:
        self.store = SqlStore(with_faults(database.open_database(self.url), self.fault_point))
        self.world = World()
        fill(self.world, self._do(self.store.snapshot()))
        self.store.listen(self.world.apply)

    async def _caught_up(self) -> None:
        while await self.store.catch_up():
            pass

    def _take(self, seen: LeaderRow, cut: int | None = None) -> None:
        self.count += 1
        answer = self._ask(
            self._always(self.store.take_term(f"leader {self.count}", TTL, instead_of=seen)), cut
        )
        if answer is not None:
            assert (answer[0] is not None) is (seen.term == self.model.term)
        row = self._do(self.store.leader())
        if answer is None or answer[0] is not None:
            assert answer is None or answer[0] == row.term
            self.old = self.model.term if row.term != self.model.term else self.old
            self.model.term = row.term

    def _ask(self, call: Coroutine[Any, Any, T], cut: int | None) -> T | None:
        """The answer; None if the call was cut and nothing was done."""
        self.fault_point.arm(Fault.CUT, cut)
        try:
            return self._do(call)
        except StoreUnavailable:
            assert cut is not None
            return None
        finally:
            self.fault_point.disarm()

    def _do(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    async def _once(self, call: Coroutine[Any, Any, Any]) -> bool:
        await call
        return True

    async def _always(self, call: Coroutine[Any, Any, T]) -> tuple[T]:
        return (await call,)

    def _pick(self, pick: int) -> Task:
        tasks = self.model.tasks
        return tasks[sorted(tasks)[pick % len(tasks)]]

    def _key_of(self, task: TaskId) -> tuple[str, str] | None:
        return next(((key, body) for key, (id, body) in self.model.keys.items() if id == task), None)

    def _new_id(self) -> TaskId:
        self.count += 1
        return TaskId(f"u{self.count:04}")


def _outdated(decision: Decision) -> Decision:
    """With a version that the row never had."""
    writes = tuple(replace(w, task=replace(w.task, version=w.task.version + 5)) for w in decision.tasks)
    leases = tuple(replace(x, version=x.version + 5) for x in decision.leases if not writes)
    return replace(decision, tasks=writes, leases=leases or decision.leases)
