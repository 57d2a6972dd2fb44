"""Leaders that sleep between a commit and its order, and send it when they wake: real brokers on real Ray.

Two brokers, each with a Ray driver of its own, stand on one PostgreSQL and one Ray. Whoever leads is stopped
when something is committed and its order not yet sent. The other one waits until that lease is past, leads,
and goes on with what there is. Then the sleeper goes on. It has noticed nothing, for its clock stood still,
and its driver delivers the order. Whether the node agent refuses it is in the agent's log, and what the order
would have done is held against what runs write down themselves.
"""

import asyncio
import json
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from gpubroker_server.adapters.ray.head.head import HeadState, running_head, stop_head
from gpubroker_server.adapters.sql.store import SqlStore, open_store
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Position, Seconds, TaskId
from gpubroker_server.core.world.events import Event
from gpubroker_server.ports.store import RunSpec, Submission

from tests.builders import GIB, a_task
from tests.chaos.databases import a_database
from tests.chaos.history import violations
from tests.e2e.broker_process import BEFORE_START, BEFORE_STOP, LEAVE, NOTICES_NOTHING, BrokerProcess
from tests.e2e.ray_lab import guest_environment, lab_options
from tests.e2e.service_process import ROOT, until

REFUSED = "refused: orders of a term that is over"
"""As the agent says it."""
WHOLE_MB = 20 * GIB
LAST_BYTES = 4000


class Database:
    """What is in it, asked by a process that takes no part."""

    def __init__(self, url: str) -> None:
        self._url = url

    def submit(self, task: Task, **arguments: str) -> None:
        """It does `tests.e2e.work:hold`."""
        spec = json.dumps({"args": [], "kwargs": arguments}).encode()
        work = RunSpec("entrypoint", "tests.e2e.work:hold", arguments=spec)
        self._ask(lambda store: store.submit(Submission(task, work)))

    def row(self, id: str) -> Task:
        record = self._ask(lambda store: store.record(TaskId(id)))
        assert record is not None
        return record.task

    def leader(self) -> str:
        """Its name, or nothing."""
        return str(self._ask(lambda store: store.leader()).holder)

    def log(self) -> list[Event]:
        return list(self._ask(lambda store: store.events(Position(0), 100_000)))

    def _ask(self, question: Callable[[SqlStore], Any]) -> Any:
        async def ask() -> Any:
            store = await open_store(self._url)
            try:
                return await question(store)
            finally:
                await store.close()

        return asyncio.run(ask())


class Claim(NamedTuple):
    task: str
    fence: int


@dataclass
class Late:
    sent: Counter[str] = field(default_factory=Counter)
    """Of each way to be late, orders that a driver delivered for a leader whose term was over."""
    refused: Counter[str] = field(default_factory=Counter)
    """Of those: the agent said so, and nothing came of it."""
    takeovers: list[float] = field(default_factory=list)
    """Seconds for which nobody led."""
    wrong: list[str] = field(default_factory=list)


class Stand:
    """The two brokers. Who slept is the next one's heir."""

    def __init__(
        self, folder: Path, url: str, head: HeadState, env: Mapping[str, str], stack: ExitStack
    ) -> None:
        self._folder, self._agents_log = folder, head.ray_dir / "session_latest" / "logs"
        self._witness = folder / "witness"
        self._database = Database(url)
        self._tasks = 0
        self._begun: list[Claim] = []
        """What should have, in this order."""
        self.late = Late()
        given: dict[str, Any] = {
            "database_url": url,
            "ray": {"address": head.address, "cluster": "late", "spares": 1, "warm_runners": 1},
            "entrypoints": ["tests.e2e.work:*"],
            "task_path": [str(ROOT)],
            "simulated_devices": [{"kind": "sim-24g", "memory_mb": 24 * GIB, "count": 1}],
            "policy": {"sample_period_seconds": 0.5, "kill_patience_seconds": 0.5},
        }

        def broker(name: str) -> BrokerProcess:
            return stack.enter_context(BrokerProcess(folder, name, NOTICES_NOTHING, env=env, **given))

        brokers = {name: broker(name) for name in ("one", "two")}
        until(lambda: bool(self._database.leader()), "one of them leads")
        self._leader = brokers.pop(self._database.leader().partition(":")[0])
        [self._heir] = brokers.values()
        self._leader.next("executor connected")
        self._heir.next("executor standby")

    def end(self) -> None:
        """Nothing of them stays on the nodes. What is wrong by now is in `late`."""
        self.late.wrong += violations(self._database.log())
        self._leader.order(LEAVE)
        self._leader.next("left")

    def last_words(self) -> str:
        """Of the brokers, their drivers and what runs on Ray."""
        logs = [
            *self._folder.glob("*/log"),
            *self._folder.glob("*/*.log"),
            *self._agents_log.glob("worker-*"),
        ]
        texts = {log: log.read_text(encoding="utf-8", errors="replace") for log in logs}
        return "\n".join(f"== {log}\n{text[-LAST_BYTES:]}" for log, text in texts.items() if text)

    def start_of_what_another_has(self) -> None:
        """Its device is at work for a task that goes before it."""
        late = self._sleep_over_a_start(gpu_mb=WHOLE_MB)
        other = self._new_task(gpu_mb=WHOLE_MB, priority=90)
        self._take_over()
        self._begins(other, 1)
        assert self._row(late).state is TaskState.PENDING
        self._wake(late, "start of what another has")
        assert self._row(late).state is TaskState.PENDING
        self._end(other)
        self._begins(late.task, 2)
        self._end(late.task)

    def start_of_what_runs_again(self) -> None:
        """Under its next claim, on the same device."""
        late = self._sleep_over_a_start(gpu_mb=WHOLE_MB)
        self._runs_again(late, "start of what runs again")

    def start_in_a_shared_process(self) -> None:
        late = self._sleep_over_a_start(cpu=0.1)
        self._runs_again(late, "start in a shared process")

    def stop_of_what_runs_again(self) -> None:
        """It gave way to a task that has come and gone since."""
        victim = self._new_task(gpu_mb=WHOLE_MB, priority=10, grace_seconds=Seconds(1.0))
        self._begins(victim, 1)
        self._leader.order(BEFORE_STOP)
        urgent = self._new_task(gpu_mb=WHOLE_MB, priority=90)
        self._fall_asleep()
        assert self._row(Claim(victim, 1)).state is TaskState.STOPPING
        self._take_over()
        self._begins(urgent, 1)
        self._end(urgent)
        self._begins(victim, 2)
        self._wake(Claim(victim, 1), "stop of what runs again")
        self._end(victim)

    def _runs_again(self, late: Claim, how: str) -> None:
        self._take_over()
        self._begins(late.task, 2)
        self._wake(late, how)
        self._end(late.task)

    def _sleep_over_a_start(self, **demand: Any) -> Claim:
        self._leader.order(BEFORE_START)
        late = Claim(self._new_task(**demand), 1)
        self._fall_asleep()
        row = self._row(late)
        assert (row.state, row.fence) == (TaskState.ADMITTED, 1)
        return late

    def _fall_asleep(self) -> None:
        self._slept_at = float(self._leader.next("stops")["at"])
        until(self._leader.is_stopped, "the leader has stopped itself")

    def _take_over(self) -> None:
        self.late.takeovers.append(float(self._heir.next("leads")["at"]) - self._slept_at)

    def _wake(self, late: Claim, how: str) -> None:
        """From here on the heir is the leader."""
        refused = self._refusals()
        self._leader.send(signal.SIGCONT)
        sent = self._leader.next("sent")
        assert (sent["task"], sent["fence"]) == late, "what it slept over is the first that it sends"
        self.late.sent[how] += 1
        until(lambda: self._refusals() > refused, "the agent has refused what came late")
        self._leader.next("stands back")
        self._check_what_began()
        self.late.refused[how] += 1
        self._leader, self._heir = self._heir, self._leader

    def _refusals(self) -> int:
        logs = self._agents_log.glob("worker-*")
        return sum(log.read_text(encoding="utf-8", errors="replace").count(REFUSED) for log in logs)

    def _new_task(self, **fields: Any) -> str:
        self._tasks += 1
        id = f"00000000-0000-7000-8000-{self._tasks:012}"
        self._database.submit(a_task(id, **fields), witness=str(self._witness), until=str(self._flag(id)))
        return id

    def _begins(self, task: str, fence: int) -> None:
        self._begun.append(Claim(task, fence))
        until(lambda: self._has_begun() == self._begun, f"this alone has begun: {self._begun[-1]}")

    def _check_what_began(self) -> None:
        assert self._has_begun() == self._begun, (self._has_begun()[-3:], self._begun[-3:])

    def _has_begun(self) -> list[Claim]:
        lines = self._witness.read_text(encoding="utf-8").splitlines() if self._witness.exists() else []
        return [Claim(task, int(fence)) for task, fence in map(str.split, lines)]

    def _end(self, task: str) -> None:
        claims = [claim for claim in self._begun if claim.task == task]
        self._flag(task).touch()
        until(lambda: self._database.row(task).state is TaskState.SUCCEEDED, "it has ended well")
        assert self._database.row(task).fence == claims[-1].fence

    def _flag(self, task: str) -> Path:
        return self._folder / f"enough-{task}"

    def _row(self, claim: Claim) -> Task:
        return self._database.row(claim.task)


WAYS: Mapping[str, Callable[[Stand], None]] = {
    "start of what another has": Stand.start_of_what_another_has,
    "start of what runs again": Stand.start_of_what_runs_again,
    "start in a shared process": Stand.start_in_a_shared_process,
    "stop of what runs again": Stand.stop_of_what_runs_again,
}


@contextmanager
def a_head() -> Iterator[tuple[HeadState, Mapping[str, str]]]:
    """A Ray of one's own, and the environment to join it."""
    with tempfile.TemporaryDirectory(prefix="gpb-late-") as home:
        options = lab_options(Path(home))
        try:
            yield asyncio.run(running_head(options)), guest_environment(options.data_dir)
        finally:
            asyncio.run(stop_head(options.data_dir))


def run(seed: int, sleepers: int) -> dict[str, Any]:
    """The record of so many, for the evidence. The first with something wrong is the last."""
    chance = Random(f"{seed}/late orders")
    ways = [chance.choice(list(WAYS)) for _ in range(sleepers)]
    with (
        tempfile.TemporaryDirectory(prefix="gpb-chaos-") as place,
        a_database("postgres", Path(place)) as url,
        a_head() as (head, env),
        ExitStack() as stack,
    ):
        stand = Stand(Path(place), url, head, env, stack)
        late = stand.late
        try:
            for way in ways:
                WAYS[way](stand)
            stand.end()
        except AssertionError as fault:
            late.wrong.append(str(fault))
            print(stand.last_words(), file=sys.stderr)
        return {
            "seed": seed,
            "sleepers": len(late.takeovers),
            "sent": dict(sorted(late.sent.items())),
            "refused": dict(sorted(late.refused.items())),
            "most_seconds_without_a_leader": round(max(late.takeovers, default=0.0), 2),
            "wrong": late.wrong,
        }
