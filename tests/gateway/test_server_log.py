"""What the log says of a model server."""

import asyncio

from gpubroker_server.inference.health_checks import HealthChecks
from structlog.testing import capture_logs

from tests.gateway.harness import until
from tests.gateway.inference_stage import INFER, a_stage
from tests.gateway.test_several_servers import SHORT, breaking_off, server


async def test_server_that_goes_and_returns_is_logged_once_each_for_all_requests() -> None:
    async with a_stage(breaking_off(times=40)) as stage:
        with capture_logs() as logs:
            for _ in range(40):
                assert (await stage.ask("POST", INFER, b"{}"))[0] == 502
            watch = asyncio.create_task(HealthChecks([server(stage, "main")], SHORT).keep())
            await until(lambda: server(stage, "main").is_up)
            watch.cancel()
        told = [log["event"] for log in logs if log["log_level"] != "debug"]
        assert told == ["a model server does not answer", "a model server answers again"]
