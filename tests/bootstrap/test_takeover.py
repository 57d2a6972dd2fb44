"""How long nobody leads, whatever becomes of the leader: brokers as processes on one PostgreSQL."""

import asyncio
import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from gpubroker_server.adapters.sql.store import open_store
from gpubroker_server.ports.store import AdmittedTask, RunSpec

from tests.bootstrap.refusals import WAITING
from tests.builders import a_task
from tests.e2e.broker_process import IN_TRANSACTION, WITH_HEAD, BrokerProcess
from tests.e2e.service_process import until

AFTER_A_STOP = 0.5
AFTER_A_LOSS = 5.0
"""Seconds until another one leads, at most."""


class Pair:
    """Two brokers, of which one leads and the other waits."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self._url = url
        self._folder = folder
        self._stack = stack
        self._brokers = 0
        self._tasks = 0
        self.leader = self.new()
        self.leader.next("leads")
        self.standby = self.new()
        self.standby.next("up")

    def new(self) -> BrokerProcess:
        self._brokers += 1
        settings: dict[str, Any] = {"database_url": self._url, "entrypoints": ["m:*"], **WAITING}
        broker = BrokerProcess(self._folder, f"broker-{self._brokers}", **settings)
        return self._stack.enter_context(broker)

    def taken_over(self, since: float, how: str) -> float:
        """Seconds until the standby leads; the roles are then changed."""
        seconds = float(self.standby.next("leads")["at"]) - since
        print(f"{how}: the next one leads after {seconds:.2f} s")
        self.leader, self.standby = self.standby, self.leader
        return seconds

    def replace_standby(self) -> None:
        self.standby = self.new()
        self.standby.next("up")

    def submit(self) -> None:
        """Something to commit; a task that only waits, and not for long."""
        self._tasks += 1
        task = a_task(f"00000000-0000-7000-8000-{self._tasks:012}", cpu=0.5)
        spec = RunSpec("entrypoint", "m:f", arguments=json.dumps({"args": [], "kwargs": {}}).encode())

        async def submit() -> None:
            store = await open_store(self._url)
            await store.submit(AdmittedTask(task, spec))
            await store.close()

        asyncio.run(submit())

    def runs_tasks(self) -> None:
        self.submit()
        self.leader.next("heard")


@pytest.fixture
def pair(postgres_url: str, tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(postgres_url, tmp_path, stack)


def test_standby_leads_in_time_when_the_leader_is_stopped_killed_or_hangs(pair: Pair) -> None:
    """The cases follow one another in one test, because processes take seconds to start."""
    since = pair.leader.send(signal.SIGTERM)
    assert pair.taken_over(since, "asked to end") <= AFTER_A_STOP
    pair.runs_tasks()

    pair.replace_standby()
    since = pair.leader.send(signal.SIGKILL)
    assert pair.taken_over(since, "kill -9") <= AFTER_A_LOSS
    pair.runs_tasks()

    pair.replace_standby()
    since = pair.leader.send(signal.SIGSTOP)
    assert pair.taken_over(since, "SIGSTOP") <= AFTER_A_LOSS
    pair.standby.send(signal.SIGCONT)
    pair.standby.next("stands back")
    pair.runs_tasks()

    # The one that was stopped leads again, in the same process.
    since = pair.leader.send(signal.SIGTERM)
    assert pair.taken_over(since, "asked to end") <= AFTER_A_STOP
    pair.runs_tasks()


@pytest.mark.parametrize("moment", [IN_TRANSACTION, WITH_HEAD])
def test_leader_that_hangs_in_a_transaction_does_not_block_others_for_long(pair: Pair, moment: str) -> None:
    pair.leader.order(moment)
    pair.submit()
    since = pair.leader.next("stops")["at"]
    until(pair.leader.is_stopped, "it has stopped itself")
    assert pair.taken_over(since, moment) <= AFTER_A_LOSS
    pair.runs_tasks()
    pair.standby.send(signal.SIGCONT)
    pair.standby.next("stands back")
