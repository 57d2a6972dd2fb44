"""Several processes that may lead, with one database and one clock, which tests set."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpubroker_server.broker.leadership import LeaderCandidate
from gpubroker_server.broker.loop import Leader
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.leader_term import LeaderTerm, LeaderTermRules
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId, Term
from gpubroker_server.ports.store import CommitVerdict, RunSpec, StoreUnavailable

from tests.broker.stage import ForgetfulStore, Hands, Stage
from tests.patience import PATIENCE_SECONDS

RULES = LeaderTermRules(Seconds(3.0), Seconds(0.75), renew_seconds=Seconds(0.01))
TOO_LONG = 2.25
"""After so long without a renewal a leader must have stopped."""


class SlowStore(ForgetfulStore):
    """A database that may take its time, while the clocks go on."""

    def __init__(self, clock: Hands) -> None:
        super().__init__(clock.now)
        self.clock = clock
        self.seconds: dict[str, float] = {}
        """Name of a call -> until its answer, once."""
        self.unread = 0
        """So many more times nobody learns what tasks are."""
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


class Party:
    """Processes with one database and one machine's clock, each with a candidate."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.clock = Hands()
        self.store = SlowStore(self.clock)
        self.stages = {name: Stage(folder / name, self.store, self.clock) for name in names}
        self.resigned = {name: asyncio.Event() for name in names}
        self.candidates = {name: self._candidate(name) for name in names}
        self.running: dict[str, asyncio.Task[None]] = {}
        self.catching_up_fails = 0

    def _candidate(self, name: str) -> LeaderCandidate:
        stage = self.stages[name]

        caught_up: list[Term] = []

        async def catch_up() -> None:
            """A store in memory tells everybody everything at once."""
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

    async def stop(self, name: str) -> None:
        """As a process stops that was asked to."""
        task = self.running.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def kill(self, name: str) -> None:
        """As a process ends that was not."""
        self.candidates[name].store = Gone(self.clock.now)
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
