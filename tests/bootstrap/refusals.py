"""Starts that must fail."""

from collections.abc import Callable
from typing import Any

from tests.e2e.service_process import ServiceProcess
from tests.patience import PATIENCE_SECONDS

WAITING: dict[str, Any] = {"engine": "simulated"}
"""An engine whose tasks only wait."""


def refusal(service: ServiceProcess, begin: Callable[[], None] | None = None) -> str:
    """The exit code must be 2, and the last line of the log says why."""
    process = service.spawn(begin)
    try:
        assert process.wait(PATIENCE_SECONDS) == 2, service.log()
    finally:
        process.kill()
    lines = service.log().splitlines()
    assert not any("Traceback" in line for line in lines), service.log()
    return lines[-1]
