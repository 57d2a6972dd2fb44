"""Event streams of a real process: they end with it, and clients go on with the next one."""

import threading
from pathlib import Path

import httpx
import pytest
from gpubroker import Broker
from gpubroker.wire.events import Event

from tests.bootstrap.refusals import WAITING
from tests.chaos.forked import ForkedService
from tests.e2e.service_process import ServiceProcess, until
from tests.patience import PATIENCE_SECONDS
from tests.triton.server import free_ports


def followed(service: ServiceProcess, found: list[Event]) -> None:
    """Follow the log until the event of a task that is called `last`."""
    with Broker(service.url, service.token, retry_seconds=PATIENCE_SECONDS) as broker:
        for event in broker.events(follow=True):
            found.append(event)
            if event.fields.get("name") == "last":
                return


@pytest.mark.parametrize("how", ["terminate", "kill_9"])
def test_followed_log_goes_on_with_the_next_process(tmp_path: Path, how: str) -> None:
    """Without a gap and without a repetition."""
    [port] = free_ports(1)
    with ForkedService(tmp_path / "data", port=port, **WAITING) as service:
        found: list[Event] = []
        reader = threading.Thread(target=followed, args=(service, found), daemon=True)
        reader.start()
        for number in range(3):
            task = service.broker.submit("tests.e2e.work:add", name=f"before {number}")
        until(lambda: any(event.key == task.id for event in found), "the events are heard")
        getattr(service, how)()
        service.start()
        service.broker.submit("tests.e2e.work:add", name="last")
        reader.join(PATIENCE_SECONDS)
        assert not reader.is_alive()
        kept = [event.position for event in service.broker.events()]
        assert found[-1].fields["name"] == "last"
        assert [event.position for event in found] == kept[: len(found)]


def test_stop_of_the_process_ends_its_streams_cleanly(tmp_path: Path) -> None:
    with ForkedService(tmp_path / "data", **WAITING) as service:
        headers = {"Authorization": f"Bearer {service.token}", "Accept": "text/event-stream"}
        with httpx.stream(
            "GET", f"{service.url}/events", headers=headers, timeout=PATIENCE_SECONDS
        ) as stream:
            lines = stream.iter_lines()
            assert next(lines) == "retry: 3000"
            service.terminate()
            rest = [line for line in lines if line]
        assert rest[-1].startswith(("id: ", "data: ")), "the last message is whole"
        assert "Traceback" not in service.log()
