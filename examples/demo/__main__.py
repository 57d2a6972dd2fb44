"""`python -m examples.demo`, or `make demo`: exits with 0 only if everything happened as expected."""

import json
import signal
import sys
import time
from dataclasses import asdict
from typing import Any

from gpubroker import BrokerError
from rich.console import Console

from examples.demo.event_lines import EventLines
from examples.demo.scenario import Result, Scenario, Unexpected
from examples.demo.screen import screen_on, summary
from examples.demo.service import ServiceFailed, running_service
from examples.demo.workload import Reference


def main() -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    began = time.monotonic()
    console = Console(highlight=False)
    try:
        result = run(console, began)
    except KeyboardInterrupt:
        return _failed("interrupted; the service was stopped", 130)
    except (Unexpected, ServiceFailed, BrokerError) as error:
        return _failed(str(error), 1)
    console.print(summary(result))
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"demo": "ok", "seconds": seconds, **asdict(result)}), flush=True)
    return 0


def run(console: Console, began: float) -> Result:
    lines = EventLines(began)
    with screen_on(console) as screen, running_service() as broker, Reference() as reference:
        lines.add(f"the service is ready at {broker.connection.url}")
        return Scenario(broker, screen, lines).run(reference)


def _interrupt(_signal: int, _frame: Any) -> None:
    raise KeyboardInterrupt


def _failed(why: str, code: int) -> int:
    print(f"demo: {why}", file=sys.stderr)
    print(json.dumps({"demo": "failed", "why": why.splitlines()[0]}), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
