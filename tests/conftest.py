"""What holds for every test: examples are the same on every machine, and a slow one fails nothing.

`--hypothesis-profile=random` draws new examples each time, and prints how to see one that fails again.

PostgreSQL is started once, when the first test asks for it; each test finds its database as if it were new.
Where several processes share the tests, each has a server of its own.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
from gpubroker_server.adapters.sql.store import migrate
from hypothesis import HealthCheck, settings

from tests.dealing import Dealer, put_in_turn
from tests.nvml.machine import Machine, a_library, forget_start, load
from tests.places import put_files_in_memory
from tests.postgres import PostgresServer, a_server, reset
from tests.stores import are_stores_open, close_stores

_SHARED = (
    *("bootstrap", "broker", "builders", "chaos", "client"),
    *("contracts", "deploy", "e2e", "gateway", "nvml.heard", "simulation"),
)
# What is asserted there shows its values as in the tests themselves.
pytest.register_assert_rewrite(*(f"tests.{part}" for part in _SHARED))

settings.register_profile(
    "repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("random", settings.get_profile("repeatable"), derandomize=False, print_blob=True)
settings.load_profile("repeatable")


put_files_in_memory()
# Hundreds of processes are started, and all of them would compile all of ours in a shell that keeps nothing.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_configure() -> None:
    """A shell has what it runs in the background ignore its keys, and so would all that tests start."""
    for key, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(key) is signal.SIG_IGN:
            signal.signal(key, usual)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Dealer:
    return Dealer(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave what the collection of thousands of tests makes out of Python's search for garbage, now and while
    the tests run: it all stays until the end, and looking at it takes a tenth of their CPU time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        put_in_turn(items)


@pytest.fixture(autouse=True)
def _logs_stay_as_they_are() -> Iterator[None]:
    """Who sets them up in this process hands its output to all tests after it, on a stream that is closed."""
    before = _set_up()
    yield
    root = logging.getLogger()
    left = [handler for handler in root.handlers if type(handler) is logging.StreamHandler]
    has_set_up = bool(left) or _set_up() != before
    structlog.reset_defaults()
    for handler in left:
        root.removeHandler(handler)
    assert not has_set_up, "this test has set up the logs of its process; run what does so apart"


@pytest.fixture(autouse=True)
def _the_collector_stays_as_it_is() -> Iterator[None]:
    """A service in this process makes full collections rare: after it all tests would leave their garbage."""
    before = gc.get_threshold()
    yield
    if gc.get_threshold() != before:
        gc.set_threshold(*before)
        gc.unfreeze()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _no_store_stays_open() -> Iterator[None]:
    """Its file and its thread would stay until this process ends."""
    yield
    if are_stores_open():
        asyncio.run(close_stores())


def _set_up() -> dict[str, Any]:
    """Who only listens to the logs for a while, and puts all back, has changed nothing."""
    return {name: str(value) for name, value in structlog.get_config().items()}


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with a_server() as server:
        yield server


@pytest.fixture(scope="session")
def _postgres_database(postgres_server: PostgresServer) -> Iterator[str]:
    url = postgres_server.new_database()
    migrate(url, "head")
    yield url
    postgres_server.drop(url)


@pytest.fixture
def postgres_url(_postgres_database: str) -> str:
    """A database at the newest schema, as it is right after its migration."""
    reset(_postgres_database)
    return _postgres_database


@pytest.fixture
def empty_postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A database in which there is nothing, not even a schema."""
    url = postgres_server.new_database()
    yield url
    postgres_server.drop(url)


@pytest.fixture(scope="session")
def nvml_library() -> Iterator[Path]:
    """The folder of the stand-in for NVIDIA's library that this process has loaded."""
    with a_library() as folder:
        load(folder)
        yield folder


@pytest.fixture
def new_machine(nvml_library: Path) -> Iterator[Callable[..., Machine]]:
    """Makes the machine that the real `pynvml` sees in this process."""
    yield partial(Machine, nvml_library)
    (nvml_library / "machine").unlink(missing_ok=True)
    forget_start()
