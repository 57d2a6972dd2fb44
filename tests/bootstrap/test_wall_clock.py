"""The wall clock of real processes is set far ahead and back, while the clock since boot goes on.

On SQLite it is the service's, on PostgreSQL the database server's.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import httpx
import pytest
from gpubroker import Broker, Refused

from tests.bootstrap.refusals import WAITING
from tests.bootstrap.steady_soon import STEADY_SECONDS
from tests.bootstrap.wall_clock import WallClock, a_wall_clock
from tests.e2e.service_process import ServiceProcess, until
from tests.patience import PATIENCE_SECONDS
from tests.postgres import a_server_of_its_own

HOUR = 3_600
DAY = 24 * HOUR
YEAR = 365 * DAY
JUMPS_SECONDS = 600.0


class SteadySoon(ServiceProcess):
    """A clock is steady after a minute instead of an hour."""

    module = "tests.bootstrap.steady_soon"


@contextmanager
def a_service(
    database: str, folder: Path, clock: WallClock, kind: type[ServiceProcess] = ServiceProcess
) -> Iterator[ServiceProcess]:
    if database == "sqlite":
        with kind(folder / "data", env=clock.env, **WAITING) as service:
            yield service
        return
    with (
        a_server_of_its_own(clock.env) as server,
        kind(folder / "data", database_url=server.url, **WAITING) as service,
    ):
        yield service


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def clock() -> Iterator[WallClock]:
    with a_wall_clock() as clock:
        yield clock


def present() -> datetime:
    return datetime.fromtimestamp(time.time(), UTC)


class Scene:
    """One of each thing that ends with time, none of which is due: one ended task, one that runs with a time
    limit, one that waits with a time limit, one that must not start yet, a token and an object."""

    def __init__(self, service: ServiceProcess) -> None:
        self.service = service
        broker = service.broker
        add = "tests.e2e.work:add"
        self.ended = broker.submit(add, cpu=0.5, idempotency_key="once").id
        broker.wait(self.ended, timeout_seconds=PATIENCE_SECONDS)
        long = {"seconds": 3600.0}
        self.running = broker.submit(add, kwargs=long, exclusive=True, gpus=2, timeout_seconds=DAY).id
        until(lambda: broker.get(self.running).state == "running", "it runs")
        self.waiting = broker.submit(add, exclusive=True, gpus=2, queue_ttl_seconds=DAY).id
        tomorrow = present() + timedelta(days=1)
        self.later = broker.submit(add, cpu=0.5, not_before=tomorrow).id
        token = broker.create_token("guest", scopes=["tasks:read"], expires_in_seconds=DAY)
        self.guest = Broker(url=service.url, token=token.token)
        self.object = broker.upload(b"pixels").id

    def check(self) -> None:
        broker = self.service.broker
        found = [broker.get(task).state for task in (self.ended, self.running, self.waiting, self.later)]
        assert found == ["succeeded", "running", "pending", "pending"]
        assert broker.submit("tests.e2e.work:add", cpu=0.5, idempotency_key="once").id == self.ended
        assert self.guest.get(self.ended).id == self.ended
        assert [stored.id for stored in broker.objects()] == [self.object]
        now, later = present(), timedelta(seconds=61)
        new = broker.submit("tests.e2e.work:add", cpu=0.5)
        ended = broker.wait(new.id, timeout_seconds=PATIENCE_SECONDS)
        assert ended.state == "succeeded"
        assert ended.submitted_at is not None
        assert now - later < ended.submitted_at < now + later

    def parts(self) -> dict[str, str]:
        answer = httpx.get(f"{self.service.url}/readyz")
        assert answer.status_code == 200, answer.text
        found: dict[str, str] = answer.json()["parts"]
        return found

    def until_clock(self, state: str) -> None:
        until(lambda: self.parts()["clock"] == state, f"its clock is {state}")

    def told(self) -> tuple[int, int]:
        """How often the log says that the clock was set, and that it counts again."""
        log = self.service.log()
        return log.count("the database's clock was set"), log.count("the database's clock counts again")


def test_nothing_ends_by_a_clock_that_was_set_and_the_service_says_so(
    database: str, tmp_path: Path, clock: WallClock
) -> None:
    with a_service(database, tmp_path, clock) as service:
        scene = Scene(service)
        scene.check()
        assert scene.parts()["clock"] == "ok"
        for jump in (YEAR, -YEAR):
            clock.set(jump)
            scene.until_clock("contradicted")
            scene.check()
            clock.set(0)
            scene.until_clock("ok")
            scene.check()
        assert scene.told() == (2, 2)
        if database == "sqlite":  # on PostgreSQL they are the server's own times
            times = [event.at for event in service.broker.events() if event.at is not None]
            assert times == sorted(times)
            assert present() - timedelta(hours=1) < times[0] < times[-1] < present() + timedelta(seconds=61)
        assert "Traceback" not in service.log()


@pytest.mark.evidence
@pytest.mark.timeout(1200)
def test_ten_minutes_of_jumps_prune_nothing_and_a_clock_that_stays_counts(
    database: str, tmp_path: Path, clock: WallClock
) -> None:
    """The service prunes every minute; the last jump shows that it would have."""
    chance = Random(7)
    with a_service(database, tmp_path, clock, SteadySoon) as service:
        scene = Scene(service)
        ahead, jumps, until_at = 0, 0, time.monotonic() + JUMPS_SECONDS
        while time.monotonic() < until_at:
            others = {-YEAR, -DAY, -HOUR, 0, HOUR, 30 * DAY, YEAR} - {ahead}
            ahead = chance.choice(sorted(others))  # another one each time: it must not be steady
            clock.set(ahead)
            jumps += 1
            calm_at = time.monotonic() + chance.uniform(1.0, STEADY_SECONDS / 2)
            while time.monotonic() < calm_at:
                scene.check()
                time.sleep(0.5)  # how often it is looked at
        clock.set(0)
        scene.until_clock("ok")
        scene.check()
        print(f"{database}: {jumps} jumps, told {scene.told()}")

        clock.set(YEAR)
        until(lambda: is_gone(service.broker, scene.ended), "it is pruned", 4 * STEADY_SECONDS)
        assert "Traceback" not in service.log()


def is_gone(broker: Broker, task: str) -> bool:
    try:
        broker.get(task)
    except Refused as refusal:
        return refusal.code == "not-found"
    return False
