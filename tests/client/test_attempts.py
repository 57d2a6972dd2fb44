"""`gpubroker show` of a task that was started several times."""

import asyncio
import io
from typing import Any

from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import Ended, Ending, Failure, Gone, NodeLost
from gpubroker_server.core.domain.units import NodeName

from tests.builders import GIB, a_sample
from tests.client.screens import Screen, command_line, run
from tests.gateway.harness import Gateway


async def shown(gateway: Gateway, line: str) -> str:
    token = gateway.admin.headers["authorization"].removeprefix("Bearer ")
    out: io.StringIO = Screen()
    with command_line(gateway, token, 80):
        await asyncio.to_thread(run, line, out)
    return "".join(f"{row.rstrip()}\n" for row in out.getvalue().splitlines())


def later(gateway: Gateway, seconds: float) -> None:
    gateway.clock.advance(seconds)
    gateway.world.measure([a_sample(key, gateway.clock.now()) for key in gateway.world.ledgers])


async def test_show_says_where_each_attempt_ran_how_long_and_why_it_ended() -> None:
    async with Gateway() as gateway:
        fields: dict[str, Any] = {
            "name": "fit",
            "priority": 20,
            "max_retries": 2,
            "resources": {"gpu_mb": 60 * GIB},
        }
        fit = await gateway.admin.submit(**fields)
        await gateway.admit(fit)
        later(gateway, 100.0)
        vip = await gateway.admin.submit(name="vip", priority=95, resources={"gpu_mb": 60 * GIB})
        await gateway.plan(vip)
        later(gateway, 3.0)
        victim = gateway.task(fit)
        await gateway.hear(Ended(victim.id, victim.fence, gateway.clock.now(), Ending.STOPPED))
        await gateway.hear(Gone(victim.id, victim.fence, gateway.clock.now(), Proof.PROCESS_ABSENT))
        first = "1: on n1 for 2m, preempted at 1970-01-12 13:48:23Z"
        assert f"attempts   {first}\n" in await shown(gateway, "show fit")
        await gateway.end(vip)
        later(gateway, 7.0)
        await gateway.admit(fit)
        later(gateway, 20.0)
        await gateway.end(fit, failure=Failure("exception", "no luck"))
        later(gateway, 10.0)
        gateway.clock.advance(3600.0)
        await gateway.pass_time()
        later(gateway, 0.0)
        await gateway.admit(fit)
        await gateway.hear(NodeLost(NodeName("n1"), "n1-1", gateway.clock.now(), "silent"))
        text = await shown(gateway, "show fit")
        lines = [line.removeprefix("attempts").strip() for line in text.splitlines()]
        assert lines[lines.index(first) :][:3] == [
            first,
            "2: on n1 for 20s, failed at 1970-01-12 13:48:50Z",
            "3: on n1 for 0s, its run was lost at 1970-01-12 14:49:00Z",
        ], text
        [phases] = [line for line in text.splitlines() if line.startswith("phases")]
        assert phases.split(maxsplit=1)[1] == "queued 60m, running 2m, stopping 3s"
