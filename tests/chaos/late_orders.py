"""Leaders paused between a commit and its order, which they send when they resume: real brokers on real Ray.

Two brokers, each with its own Ray driver, share one PostgreSQL and one Ray. The leader is paused when a
decision is committed and its order not yet sent. The other broker waits for the end of the lease, leads and
goes on. Then the paused leader resumes. It noticed nothing, because its clock stood still, and its driver
delivers the order. The node agent's log says whether the agent refused it, and the lines that runs write say
whether it had an effect.
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
from gpubroker_server.ports.store import AdmittedTask, RunSpec

from tests.builders import GIB, a_task
from tests.chaos.database import a_database
from tests.chaos.history import violations
from tests.e2e.broker_process import BEFORE_START, BEFORE_STOP, LEAVE, NOTICES_NOTHING, BrokerProcess
from tests.e2e.ray_lab import guest_environment, lab_options
from tests.e2e.service_process import ROOT, until

REFUSED = "refused: orders of a term that is over"
"""In the log of the node agent."""
WHOLE_MB = 20 * GIB
LAST_BYTES = 4000


class Database:
    """Submits tasks and reads rows, beside the brokers."""

    def __init__(self, url: str) -> None:
        self._url = url

    def submit(self, task: Task, **arguments: str) -> None:
        """A task that runs `tests.e2e.work:hold`."""
        data = json.dumps({"args": [], "kwargs": arguments}).encode()
        spec = RunSpec("entrypoint", "tests.e2e.work:hold", arguments=data)
        self._ask(lambda store: store.submit(AdmittedTask(task, spec)))

    def row(self, id: str) -> Task:
        record = self._ask(lambda store: store.record(TaskId(id)))
        assert record is not None
        return record.task

    def leader(self) -> str:
        """Its name; empty if there is none."""
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
class Outcome:
    sent: Counter[str] = field(default_factory=Counter)
    """Kind of order -> orders that a driver delivered for a leader whose term was over."""
    refused: Counter[str] = field(default_factory=Counter)
    """Kind of order -> orders that the agent refused, without any effect."""
    takeovers: list[float] = field(default_factory=list)
    """Seconds without a leader."""
    wrong: list[str] = field(default_factory=list)


class TwoBrokers:
    """After a pause the two swap roles: the successor is the next leader to be paused."""

    def __init__(
        self, folder: Path, url: str, head: HeadState, env: Mapping[str, str], stack: ExitStack
    ) -> None:
        self._folder, self._ray_logs = folder, head.ray_dir / "session_latest" / "logs"
        self._run_dirs = Path(env["TMPDIR"])
        self._witness = folder / "witness"
        self._database = Database(url)
        self._tasks = 0
        self._expected: list[Claim] = []
        """The claims that should have started, in order."""
        self.outcome = Outcome()
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
        [self._successor] = brokers.values()
        self._leader.next("executor connected")
        self._successor.next("executor standby")

    def end(self) -> None:
        """Remove the agents from the nodes, and check the log; see `outcome.wrong`."""
        self.outcome.wrong += violations(self._database.log())
        self._successor.end(signal.SIGTERM)  # it would lead when the other leaves, and start another agent
        self._leader.order(LEAVE)
        self._leader.next("left")

    def logs(self) -> str:
        """The ends of the logs of brokers, drivers and Ray's workers."""
        logs = [
            *self._folder.glob("*/log"),
            *self._folder.glob("*/*.log"),
            *self._ray_logs.glob("worker-*"),
            *self._run_dirs.rglob("agent.log"),
        ]
        texts = {log: log.read_text(encoding="utf-8", errors="replace") for log in logs}
        return "\n".join(f"== {log}\n{text[-LAST_BYTES:]}" for log, text in texts.items() if text)

    def start_on_a_leased_device(self) -> None:
        """Meanwhile the device is leased to a task of higher priority."""
        late = self._pause_before_a_start(gpu_mb=WHOLE_MB)
        other = self._new_task(gpu_mb=WHOLE_MB, priority=90)
        self._take_over()
        self._expect_start(other, 1)
        assert self._row(late).state is TaskState.PENDING
        self._resume(late, "start on a leased device")
        assert self._row(late).state is TaskState.PENDING
        self._end(other)
        self._expect_start(late.task, 2)
        self._end(late.task)

    def start_of_a_task_that_runs_again(self) -> None:
        """Meanwhile the task runs under its next claim, on the same device."""
        late = self._pause_before_a_start(gpu_mb=WHOLE_MB)
        self._runs_again(late, "start of a task that runs again")

    def start_in_a_shared_process(self) -> None:
        late = self._pause_before_a_start(cpu=0.1)
        self._runs_again(late, "start in a shared process")

    def stop_of_a_task_that_runs_again(self) -> None:
        """It was preempted by a task that has ended meanwhile."""
        victim = self._new_task(gpu_mb=WHOLE_MB, priority=10, grace_seconds=Seconds(1.0))
        self._expect_start(victim, 1)
        self._leader.order(BEFORE_STOP)
        urgent = self._new_task(gpu_mb=WHOLE_MB, priority=90)
        self._wait_for_the_pause()
        assert self._row(Claim(victim, 1)).state is TaskState.STOPPING
        self._take_over()
        self._expect_start(urgent, 1)
        self._end(urgent)
        self._expect_start(victim, 2)
        self._resume(Claim(victim, 1), "stop of a task that runs again")
        self._end(victim)

    def _runs_again(self, late: Claim, kind: str) -> None:
        self._take_over()
        self._expect_start(late.task, 2)
        self._resume(late, kind)
        self._end(late.task)

    def _pause_before_a_start(self, **demand: Any) -> Claim:
        self._leader.order(BEFORE_START)
        late = Claim(self._new_task(**demand), 1)
        self._wait_for_the_pause()
        row = self._row(late)
        assert (row.state, row.fence) == (TaskState.ADMITTED, 1)
        return late

    def _wait_for_the_pause(self) -> None:
        self._paused_at = float(self._leader.next("stops")["at"])
        until(self._leader.is_stopped, "the leader is paused")

    def _take_over(self) -> None:
        self.outcome.takeovers.append(float(self._successor.next("leads")["at"]) - self._paused_at)

    def _resume(self, late: Claim, kind: str) -> None:
        """The successor remains the leader."""
        refused = self._refusals()
        self._leader.send(signal.SIGCONT)
        sent = self._leader.next("sent")
        assert (sent["task"], sent["fence"]) == late, "the delayed order is sent first"
        self.outcome.sent[kind] += 1
        until(lambda: self._refusals() > refused, "the agent has refused the late order")
        self._leader.next("stands back")
        self._check_starts()
        self.outcome.refused[kind] += 1
        self._leader, self._successor = self._successor, self._leader

    def _refusals(self) -> int:
        logs = self._run_dirs.rglob("agent.log")
        return sum(log.read_text(encoding="utf-8", errors="replace").count(REFUSED) for log in logs)

    def _new_task(self, **fields: Any) -> str:
        self._tasks += 1
        id = f"00000000-0000-7000-8000-{self._tasks:012}"
        self._database.submit(a_task(id, **fields), witness=str(self._witness), until=str(self._flag(id)))
        return id

    def _expect_start(self, task: str, fence: int) -> None:
        self._expected.append(Claim(task, fence))
        until(
            lambda: self._started() == self._expected,
            f"only the expected runs have started, last {self._expected[-1]}",
        )

    def _check_starts(self) -> None:
        assert self._started() == self._expected, (self._started()[-3:], self._expected[-3:])

    def _started(self) -> list[Claim]:
        lines = self._witness.read_text(encoding="utf-8").splitlines() if self._witness.exists() else []
        return [Claim(task, int(fence)) for task, fence in map(str.split, lines)]

    def _end(self, task: str) -> None:
        claims = [claim for claim in self._expected if claim.task == task]
        self._flag(task).touch()
        until(lambda: self._database.row(task).state is TaskState.SUCCEEDED, "the task has succeeded")
        assert self._database.row(task).fence == claims[-1].fence

    def _flag(self, task: str) -> Path:
        return self._folder / f"enough-{task}"

    def _row(self, claim: Claim) -> Task:
        return self._database.row(claim.task)


KINDS: Mapping[str, Callable[[TwoBrokers], None]] = {
    "start on a leased device": TwoBrokers.start_on_a_leased_device,
    "start of a task that runs again": TwoBrokers.start_of_a_task_that_runs_again,
    "start in a shared process": TwoBrokers.start_in_a_shared_process,
    "stop of a task that runs again": TwoBrokers.stop_of_a_task_that_runs_again,
}


@contextmanager
def a_head() -> Iterator[tuple[HeadState, Mapping[str, str]]]:
    """A new local Ray, and the environment to join it."""
    with tempfile.TemporaryDirectory(prefix="gpb-late-") as home:
        options = lab_options(Path(home))
        try:
            yield asyncio.run(running_head(options)), guest_environment(options.data_dir)
        finally:
            asyncio.run(stop_head(options.data_dir))


def run(seed: int, pauses: int) -> dict[str, Any]:
    """The record of this many pauses; it ends at the first violation."""
    chance = Random(f"{seed}/late orders")
    kinds = [chance.choice(list(KINDS)) for _ in range(pauses)]
    with (
        tempfile.TemporaryDirectory(prefix="gpb-chaos-") as place,
        a_database("postgres", Path(place)) as url,
        a_head() as (head, env),
        ExitStack() as stack,
    ):
        brokers = TwoBrokers(Path(place), url, head, env, stack)
        outcome = brokers.outcome
        try:
            for kind in kinds:
                KINDS[kind](brokers)
            brokers.end()
        except AssertionError as fault:
            outcome.wrong.append(str(fault))
            print(brokers.logs(), file=sys.stderr)
        return {
            "seed": seed,
            "pauses": len(outcome.takeovers),
            "sent": dict(sorted(outcome.sent.items())),
            "refused": dict(sorted(outcome.refused.items())),
            "most_seconds_without_a_leader": round(max(outcome.takeovers, default=0.0), 2),
            "wrong": outcome.wrong,
        }
