"""A service whose queue is soon too long."""

import time
from datetime import UTC, datetime, timedelta
from typing import Any

from gpubroker import Broker, BrokerError, Task

from tests.e2e.service_process import ServiceProcess

FULL_AT_THREE: dict[str, Any] = {
    "fleet": {
        "backpressure": {"queue_length": {"high": 3, "low": 2, "seconds": 0}, "retry_after_seconds": 1}
    },
    "policy": {"sample_period_seconds": 0.1},
}


def wait_in(service: ServiceProcess) -> Task:
    """Submit a task that waits for an hour before it may start, and return it."""
    later = datetime.fromtimestamp(time.time(), UTC) + timedelta(hours=1)
    return service.broker.submit("tests.e2e.work:add", not_before=later)


def refusal(service: ServiceProcess, priority: int) -> BrokerError | None:
    """Of a task, asked once; one that is taken is cancelled."""
    asked = Broker(url=service.url, token=service.token, retry_seconds=0.0)
    try:
        asked.cancel(asked.submit("tests.e2e.work:add", priority=priority, held=True))
    except BrokerError as refused:
        return refused
    return None


def pressures(service: ServiceProcess) -> list[str]:
    """What the log says of it."""
    said = "fleet.BACKPRESSURE_"
    kinds = [event.kind for event in service.broker.events(last=500)]
    return [kind.removeprefix(said) for kind in kinds if kind.startswith(said)]
