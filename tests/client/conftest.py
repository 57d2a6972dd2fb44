import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpubroker import AsyncBroker, Broker

from tests.client.command_line import Run, command_line
from tests.client.recorded_service import RecordedService

Do = Callable[..., Any]
ITERATORS = frozenset(
    {"list", "events", "leases", "objects", "logs", "map", "array_items", "array_progress", "download"}
)


@pytest.fixture(autouse=True)
def no_service_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("GPUBROKER_URL", "GPUBROKER_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("GPUBROKER_DATA_DIR", str(tmp_path / "data"))


@pytest.fixture
def service() -> Iterator[RecordedService]:
    with RecordedService() as running:
        yield running


@pytest.fixture
def run(service: RecordedService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line, talking to recorded answers."""
    monkeypatch.setenv("GPUBROKER_URL", service.url)
    monkeypatch.setenv("GPUBROKER_TOKEN", "gpb_secret")
    return command_line(monkeypatch, capsys)


@pytest.fixture(params=["sync", "async"])
def do(request: pytest.FixtureRequest, service: RecordedService) -> Do:
    """Call a method of the SDK by name, of `Broker` and of `AsyncBroker`; iterators become lists."""

    def do_sync(name: str, *args: Any, **options: Any) -> Any:
        with Broker(service.url, "gpb_secret", retry_seconds=5) as broker:
            found = getattr(broker, name)(*args, **options)
            return list(found) if name in ITERATORS else found

    async def do_async(name: str, *args: Any, **options: Any) -> Any:
        async with AsyncBroker(service.url, "gpb_secret", retry_seconds=5) as broker:
            found = getattr(broker, name)(*args, **options)
            return [item async for item in found] if name in ITERATORS else await found

    if request.param == "sync":
        return do_sync
    return lambda name, *args, **options: asyncio.run(do_async(name, *args, **options))
