"""Who leads, and when it must stop: no decision, no commit and no order after its time is over."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from gpubroker_server.adapters.blobs.directory import DirectoryBlobs
from gpubroker_server.broker import leadership
from gpubroker_server.broker.leadership import LeaderCandidate
from gpubroker_server.broker.loop import Leader
from gpubroker_server.core.domain.decisions import Decision, Request
from gpubroker_server.core.domain.leader_term import LeaderTerm, LeaderTermRules
from gpubroker_server.core.domain.orders import Ended, Ending, StartOrder, TermRefused
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Fence, Instant, Lineage, NodeName, Seconds, TaskId, Term
from gpubroker_server.ports.store import CommitVerdict, LeaderTermOver, RunSpec, StoreUnavailable
from structlog.testing import capture_logs

from tests.broker.stage import ForgetfulStore, Hands, Stage, a_stage
from tests.builders import GIB, NOW
from tests.contracts.scenes import next_term
from tests.patience import PATIENCE_SECONDS
from tests.stores import SteppedStore

RULES = LeaderTermRules(Seconds(3.0), Seconds(0.75), renew_seconds=Seconds(0.01))
TOO_LONG = 2.25
"""After so long without a renewal a leader must have stopped."""


class SlowStore(ForgetfulStore):
    """A database that may take its time, while the clocks go on."""

    def __init__(self, clock: Hands) -> None:
        super().__init__(clock)
        self.clock = clock
        self.seconds: dict[str, float] = {}
        """The delay of the next answer to a call, by the name of the call."""
        self.unread = 0
        """How many more times the specs of tasks cannot be read."""
        self.passed = asyncio.Event()

    async def commit(self, term: Term, decisions: Sequence[Decision]) -> Sequence[CommitVerdict]:
        verdicts = await super().commit(term, decisions)
        self._pass("commit")
        return verdicts

    async def specs(self, tasks: Sequence[TaskId]) -> Mapping[TaskId, RunSpec]:
        if self.unread > 0:
            self.unread -= 1
            raise StoreUnavailable("cut by the test")
        specs = await super().specs(tasks)
        self._pass("specs")
        return specs

    async def renew(self, term: Term, ttl_seconds: Seconds) -> None:
        await super().renew(term, ttl_seconds)
        self._pass("renew")

    def _pass(self, call: str) -> None:
        if call in self.seconds:
            self.clock.time = Instant(self.clock.time + self.seconds.pop(call))
            self.passed.set()


class SteppedSlowStore(SlowStore, SteppedStore):
    """A slow store that answers in the turn of the event loop that asks."""


class Party:
    """Processes with one database and one machine's clock, each with a candidate."""

    def __init__(self, folder: Path, *names: str, kind: type[SlowStore] = SlowStore) -> None:
        self.clock = Hands()
        self.store = kind(self.clock)
        self.stages = {name: Stage(folder / name, self.store, self.clock) for name in names}
        self.resigned = {name: asyncio.Event() for name in names}
        self.candidates = {name: self._candidate(name) for name in names}
        self.running: dict[str, asyncio.Task[None]] = {}
        self.catching_up_fails = 0

    def _candidate(self, name: str) -> LeaderCandidate:
        stage = self.stages[name]

        caught_up: list[Term] = []

        async def catch_up() -> None:
            """All processes of a test share one store, which tells everybody everything at once."""
            if self.catching_up_fails > 0:
                self.catching_up_fails -= 1
                raise StoreUnavailable("cut by the test")
            caught_up.append((await self.store.leader()).term)

        def new_leader(leader_term: LeaderTerm) -> Leader:
            assert caught_up[-1] == leader_term.term, (
                "what the leader before committed last is not in the picture"
            )
            stage.leader = stage.new_leader(leader_term)
            return stage.leader

        return LeaderCandidate(
            name=name,
            store=self.store,
            executor=stage.executor,
            rules=RULES,
            ticks=self.clock.ticks,
            chance=lambda: 0.0,
            new_leader=new_leader,
            catch_up=catch_up,
            resigned=self.resigned[name],
        )

    def begin(self, name: str) -> None:
        self.running[name] = asyncio.create_task(self.candidates[name].run())

    async def watch(self, name: str) -> None:
        """Begin a process while another one leads; returns when it has seen that."""
        self.begin(name)
        await self.looks(name)

    async def looks(self, name: str) -> None:
        """Wait until this process has read the leader's row once more."""
        candidate = self.candidates[name]
        seen = candidate.row
        async with asyncio.timeout(PATIENCE_SECONDS):
            while candidate.row is seen:  # noqa: ASYNC110  # to look sends no events
                await asyncio.sleep(0)

    async def stop(self, name: str) -> None:
        """Stop a process as if it had been asked to."""
        task = self.running.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def kill(self, name: str) -> None:
        """End a process as if it had died: it cannot write to the database any more."""
        self.candidates[name].store = Gone(self.clock)
        await self.stop(name)

    def leading(self) -> list[tuple[str, Term]]:
        led = {name: candidate.term for name, candidate in self.candidates.items()}
        return [(name, term) for name, term in led.items() if term is not None]

    async def until(self, *leading: tuple[str, int]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.leading() != list(leading):  # noqa: ASYNC110  # who leads sends no events
                await asyncio.sleep(0)


class Gone(ForgetfulStore):
    away = True


@asynccontextmanager
async def a_party(folder: Path, *names: str, kind: type[SlowStore] = SlowStore) -> AsyncIterator[Party]:
    """Yield a party, whose processes are stopped at the end."""
    party = Party(folder, *names, kind=kind)
    try:
        yield party
    finally:
        for name in list(party.running):
            await party.stop(name)


class SlowBlobs(DirectoryBlobs):
    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.blobs_folder, max_bytes=10_000)
        self._stage = stage

    async def put(self, data: bytes, *, owner: str) -> str:
        later(self._stage, TOO_LONG)
        return await super().put(data, owner=owner)


@pytest.fixture
def store() -> SlowStore:
    return SlowStore(Hands())


@pytest.fixture
async def stage(tmp_path: Path, store: SlowStore) -> AsyncIterator[Stage]:
    """A leader whose term has just been renewed."""
    async with a_stage(tmp_path / "blobs", store, store.clock) as stage:
        leader_term = LeaderTerm(await next_term(store), RULES.trusted_until(stage.clock.ticks()))
        await stage.lead(leader_term)
        yield stage


def later(stage: Stage, seconds: float) -> None:
    stage.clock.time = Instant(stage.clock.time + seconds)


async def test_a_leader_past_its_deadline_decides_commits_and_sends_nothing(stage: Stage) -> None:
    await stage.submit("one", gpu_mb=GIB)
    head = await stage.store.head()
    later(stage, TOO_LONG)
    with pytest.raises(LeaderTermOver, match="was not renewed in time"):
        await stage.leader.cycle()
    assert (await stage.store.head(), stage.executor.sent) == (head, [])


async def test_a_leader_whose_time_ends_in_the_middle_of_a_cycle_commits_no_more(
    stage: Stage, store: SlowStore
) -> None:
    held = await stage.submit("held", gpu_mb=GIB)
    await stage.submit("one", gpu_mb=GIB)
    await stage.store.request(Request("r1", held.id, "default", "change", {"held": True}, Instant(NOW)))
    store.seconds["commit"] = TOO_LONG
    with pytest.raises(LeaderTermOver):
        await stage.leader.cycle()
    assert (await stage.row("held")).held
    assert (await stage.row("one")).state is TaskState.PENDING


async def test_leader_whose_time_ends_during_a_large_write_does_not_commit_it(
    stage: Stage, store: SlowStore
) -> None:
    await stage.submit("one", seconds=3600, gpu_mb=GIB)
    await stage.leader.cycle()
    stage.blobs = SlowBlobs(stage)
    await stage.lead(stage.leader.leader_term)
    ended = Ended(TaskId("one"), Fence(1), Instant(NOW), Ending.SUCCEEDED, result=b'"' + b"x" * 5000 + b'"')
    with pytest.raises(LeaderTermOver):
        await stage.hear(ended)
    assert (await stage.row("one")).state is TaskState.RUNNING
    assert await store.result(TaskId("one")) is None


async def test_what_was_committed_in_time_is_not_sent_once_the_time_is_over(
    stage: Stage, store: SlowStore
) -> None:
    """The leader is stopped between its commit and its orders."""
    await stage.submit("one", gpu_mb=GIB)
    store.seconds["commit"] = TOO_LONG
    with pytest.raises(LeaderTermOver):
        await stage.leader.cycle()
    assert (await stage.row("one")).state is TaskState.ADMITTED
    assert stage.executor.sent == []


async def test_what_is_handed_over_once_the_time_is_over_is_not_carried_out(
    stage: Stage, store: SlowStore
) -> None:
    """The leader is stopped behind its own last look at the clock, while it reads what a start needs and
    could not read while it was committed."""
    await stage.submit("one", gpu_mb=GIB)
    store.unread, store.seconds["specs"] = 1, TOO_LONG
    await stage.leader.cycle()
    assert [type(order) for order, _ in stage.executor.sent] == [StartOrder]
    assert stage.executor.begun == set()
    with pytest.raises(LeaderTermOver):
        await stage.leader.cycle()


async def test_a_start_that_never_left_is_made_good_in_the_next_term(stage: Stage, store: SlowStore) -> None:
    await stage.submit("one", seconds=3600, gpu_mb=GIB)
    store.seconds["commit"] = TOO_LONG
    with pytest.raises(LeaderTermOver):
        await stage.leader.cycle()
    await stage.lead(LeaderTerm(await next_term(store)))
    await stage.later(5.0)
    await stage.turns_until("one", TaskState.RUNNING)
    row = await stage.row("one")
    assert (row.fence, row.failures) == (2, 0)


@pytest.fixture
def _nobody_waits_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "POLL_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(leadership, "RETRY_SECONDS", 0.0)


@pytest.fixture
async def party(tmp_path: Path, _nobody_waits_to_look: None) -> AsyncIterator[Party]:
    async with a_party(tmp_path, "one", "two") as party:
        yield party


@pytest.fixture
async def stepped_party(tmp_path: Path, _nobody_waits_to_look: None) -> AsyncIterator[Party]:
    async with a_party(tmp_path, "one", kind=SteppedSlowStore) as party:
        yield party


async def test_of_two_candidates_one_leads(party: Party) -> None:
    party.begin("one")
    await party.until(("one", 1))
    with capture_logs() as lines:
        await party.watch("two")
        await party.looks("two")
    assert party.leading() == [("one", 1)]
    standing_by = [line["leader"] for line in lines if line["event"] == "standing by"]
    assert standing_by == ["one"], "said once"
    row = party.candidates["two"].row
    assert row is not None
    assert row.holder == "one"


async def test_a_leader_that_is_stopped_lets_the_next_one_lead_at_once(party: Party) -> None:
    party.begin("one")
    await party.until(("one", 1))
    await party.watch("two")
    await party.stop("one")
    await party.until(("two", 2))


async def test_a_stopped_leader_resigns_before_agents_have_its_last_orders(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leadership, "FLUSH_SECONDS", TOO_LONG)
    asked, taken, over = asyncio.Event(), asyncio.Event(), asyncio.Event()
    executor = party.candidates["one"].executor
    stand_back = executor.stand_back

    async def flush() -> None:
        asked.set()
        await taken.wait()

    async def note_end() -> None:
        over.set()
        await stand_back()

    party.begin("one")
    await party.until(("one", 1))
    await party.watch("two")
    monkeypatch.setattr(executor, "flush", flush)
    monkeypatch.setattr(executor, "stand_back", note_end)
    stopping = asyncio.create_task(party.stop("one"))
    await asked.wait()
    await party.until(("two", 2))
    assert not over.is_set(), "what is on its way may still arrive"
    taken.set()
    await stopping
    assert over.is_set()


async def test_candidate_that_hears_of_a_released_term_takes_it_at_once(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leadership, "POLL_SECONDS", (3600.0, 3600.0))
    party.begin("one")
    await party.until(("one", 1))
    await party.watch("two")
    await party.stop("one")
    for _ in range(5):  # longer than to look and to take the term
        await party.store.leader()
        await party.store.catch_up()
    assert party.leading() == []
    party.resigned["two"].set()
    await party.until(("two", 2))


async def test_a_leader_that_is_gone_leads_until_its_lease_is_past_and_no_longer(party: Party) -> None:
    party.begin("one")
    await party.until(("one", 1))
    await party.watch("two")
    await party.kill("one")
    party.clock.time = Instant(party.clock.time + RULES.ttl_seconds - 0.1)
    await party.looks("two")
    assert party.leading() == []
    party.clock.time = Instant(party.clock.time + 0.2)
    await party.until(("two", 2))


async def test_a_leader_that_slept_stands_back_and_leads_again_if_no_other_does(party: Party) -> None:
    party.begin("one")
    await party.until(("one", 1))
    party.clock.time = Instant(party.clock.time + 3600.0)
    await party.until(("one", 2))
    assert (party.candidates["one"].term, party.candidates["one"].seconds_left()) == (Term(2), TOO_LONG)


async def test_leader_without_its_database_stands_back_and_leads_again_with_it(
    party: Party,
) -> None:
    party.begin("one")
    await party.until(("one", 1))
    party.store.away = True
    party.clock.time = Instant(party.clock.time + TOO_LONG)
    await party.until()
    party.store.come_back()
    await party.until(("one", 2))


async def test_a_leader_that_hears_of_another_term_stands_back(party: Party) -> None:
    party.begin("one")
    await party.until(("one", 1))
    await next_term(party.store, "another", ttl_seconds=3600.0)
    await party.until()
    assert (party.candidates["one"].term, party.candidates["one"].seconds_left()) == (None, 0.0)


async def test_a_leader_that_is_stopped_while_it_stands_back_stops(stepped_party: Party) -> None:
    """At each turn of the event loop: no answer of the database takes longer than to the next one."""
    party = stepped_party
    for turns in range(20):
        party.begin("one")
        async with asyncio.timeout(10.0):
            while not party.leading():  # noqa: ASYNC110  # who leads sends no events
                await asyncio.sleep(0)
        await next_term(party.store, "another", ttl_seconds=0.0)
        for _ in range(turns):
            await asyncio.sleep(0)
        stopped = party.running.pop("one")
        stopped.cancel()
        done, _ = await asyncio.wait({stopped}, timeout=5.0)
        assert done, f"it goes on though it was stopped {turns} turns after its term was over"


async def test_leader_that_cannot_read_earlier_commits_waits_until_it_can(
    party: Party,
) -> None:
    party.catching_up_fails = 2
    party.begin("one")
    await party.until(("one", 1))
    assert party.catching_up_fails == 0


async def test_a_candidate_waits_for_the_database_before_it_leads(party: Party) -> None:
    party.store.away = True
    party.begin("one")
    for _ in range(100):
        await asyncio.sleep(0)
    assert not party.running["one"].done()
    party.store.come_back()
    await party.until(("one", 1))


@pytest.mark.parametrize("how", ["comes to an end", "is cancelled by nobody"])
async def test_a_leader_that_ends_by_itself_ends_its_process(
    party: Party, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async def end(_leader: Leader) -> None:
        if how != "comes to an end":
            raise asyncio.CancelledError

    monkeypatch.setattr(Leader, "run", end)
    party.begin("one")
    with pytest.raises(ExceptionGroup) as raised:
        await party.running.pop("one")
    assert raised.group_contains(RuntimeError, match="although it was not asked to")
    assert (await party.store.leader()).is_past, "it has let its term go"


async def test_the_next_leader_carries_on_with_what_is_in_the_queue(party: Party) -> None:
    party.begin("one")
    await party.until(("one", 1))
    await party.watch("two")
    await party.stop("one")
    ended = asyncio.Event()
    party.store.listen(lambda events: ended.set() if "task.succeeded" in {e.kind for e in events} else None)
    await party.stages["two"].submit("task", gpu_mb=GIB)
    await asyncio.wait_for(ended.wait(), PATIENCE_SECONDS)


async def test_renewal_with_a_late_answer_counts_from_when_it_was_asked_for(party: Party) -> None:
    party.begin("one")
    await party.until(("one", 1))
    began = party.clock.ticks()
    party.store.seconds["renew"] = 2.0
    await party.store.passed.wait()
    assert party.clock.ticks() == began + 2.0
    assert party.candidates["one"].seconds_left() == TOO_LONG - 2.0


async def test_leader_whose_database_lost_terms_leads_again_in_a_new_lineage(party: Party) -> None:
    """After a restore from a backup, the agents have heard of terms that the database has lost."""
    party.begin("one")
    await party.until(("one", 1))
    party.stages["one"].executor.hear(TermRefused(NodeName("n1"), Lineage(0), Term(7)))
    await party.until(("one", 2))
    assert (await party.store.leader()).lineage > 0


async def test_leader_refused_by_a_later_lineage_says_so_and_takes_nothing_away(party: Party) -> None:
    """It may be the primary that a standby has replaced, and does not know it."""
    party.begin("one")
    await party.until(("one", 1))
    with capture_logs() as lines:
        party.stages["one"].executor.hear(TermRefused(NodeName("n1"), Lineage(5), Term(1)))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not [line for line in lines if "gpubroker new-lineage" in line["event"]]:  # noqa: ASYNC110
                await asyncio.sleep(0)
    assert party.leading() == [("one", 1)]
    assert (await party.store.leader()).lineage == 0


async def test_a_refusal_because_another_process_leads_begins_no_lineage(party: Party) -> None:
    party.begin("one")
    await party.until(("one", 1))
    seen = await party.store.leader()
    await party.store.take_term("elsewhere", RULES.ttl_seconds, instead_of=seen)
    party.stages["one"].executor.hear(TermRefused(NodeName("n1"), Lineage(0), Term(2)))
    await party.until()
    assert (await party.store.leader()).lineage == 0


async def test_leader_whose_picture_is_read_again_decides_nothing_by_the_old_one(
    party: Party,
) -> None:
    party.begin("one")
    await party.until(("one", 1))
    leader_term = party.stages["one"].leader.leader_term
    party.candidates["one"].end_term("the database was restored", has_lost_commits=True)
    assert leader_term.is_over(party.clock.ticks())
    await party.until(("one", 2))
    assert (await party.store.leader()).lineage > 0
