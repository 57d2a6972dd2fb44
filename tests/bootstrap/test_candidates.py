"""Two brokers in one process on one PostgreSQL, each with a store, a picture and an engine of its own."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from gpubroker_server.adapters.blobs.directory import DirectoryBlobs
from gpubroker_server.adapters.sql.store import SqlStore, open_store
from gpubroker_server.bootstrap.broker_role import BrokerRole
from gpubroker_server.bootstrap.follower import LogFollower
from gpubroker_server.bootstrap.run_access import RunAccess
from gpubroker_server.core.domain.policy import HALF_LIFE_SECONDS
from gpubroker_server.core.world.events import Event
from gpubroker_server.settings.loading import load_settings

from tests.bootstrap.refusals import WAITING
from tests.builders import a_task
from tests.chaos.history import violations
from tests.contracts.scenes import a_submission, log_of
from tests.patience import PATIENCE_SECONDS


class Member:
    def __init__(self, role: BrokerRole, store: SqlStore, jobs: list["asyncio.Task[None]"]) -> None:
        self.role = role
        self.store = store
        self._jobs = jobs

    async def runs(self, task: str) -> None:
        """Submit one that only waits, and hear of its end."""
        ended = asyncio.Event()

        def hear(events: Sequence[Event]) -> None:
            if any((event.kind, event.key) == ("task.succeeded", task) for event in events):
                ended.set()

        self.store.listen(hear)
        await self.store.submit(a_submission(a_task(task, cpu=0.5)))
        await asyncio.wait_for(ended.wait(), PATIENCE_SECONDS)

    async def end(self) -> None:
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)


@asynccontextmanager
async def a_member(url: str, folder: Path, name: str) -> AsyncIterator[Member]:
    (folder / name).mkdir()
    settings = load_settings(data_dir=folder / name, database_url=url, entrypoints=["jobs:*"], **WAITING)
    store = await open_store(url)

    def fail(part: str, fault: BaseException) -> None:
        raise AssertionError(f"{part} of {name} failed") from fault

    picture = LogFollower(store, HALF_LIFE_SECONDS, fail)
    blobs = DirectoryBlobs(folder / name / "blobs", max_bytes=2**20)
    role = BrokerRole(name, settings, store, picture, blobs, RunAccess(settings, None))
    await picture.begin()
    jobs = [asyncio.create_task(job) for part in (role, picture) for _, job in part.jobs()]
    member = Member(role, store, jobs)
    yield member
    await member.end()
    await role.close(stop_cluster=True)
    await store.close()


async def leads(*members: Member) -> Member:
    """The one that does; two never do."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (leading := [member for member in members if member.role.term() is not None]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    [leader] = leading
    return leader


async def test_a_new_leader_continues_where_the_last_one_stopped(postgres_url: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        pair = [await stack.enter_async_context(a_member(postgres_url, tmp_path, n)) for n in ("a", "b")]
        first = await leads(*pair)
        [other] = [member for member in pair if member is not first]
        await other.runs("t1")
        await first.end()
        assert await leads(other) is other
        await other.runs("t2")
        assert other.role.term() == 2
        assert violations(await log_of(other.store)) == []
