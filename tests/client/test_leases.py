"""GPU memory for programs that the broker does not start, in the SDK and on the command line."""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from gpubroker import AsyncBroker, Broker, LeaseEnded, LeaseState, Refused

from service.gateway.identity import EVERY_SCOPE
from tests.builders import GIB
from tests.client.command_line import Run
from tests.client.recorded_service import FULL_ID, RecordedService, Reply, a_problem
from tests.gateway.harness import PATIENCE_SECONDS, Gateway, before

AT = "2026-11-21T10:02:11.412Z"


def a_lease(state: str = "held", **more: Any) -> dict[str, Any]:
    """A lease as the service answers it, as far as a client needs it."""
    devices = [{"uuid": "GPU-1", "gpu_mb": 1024, "state": "held"}] if state == "held" else []
    facts = {"id": FULL_ID, "holder": "vllm", "gpus": 1, "gpu_mb": 1024, "ttl_seconds": 60.0, "node": "n1"}
    return {**facts, "state": state, "devices": devices, "grace_seconds": 10.0, "notice": None, **more}


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with Gateway() as running:
        yield running


@pytest.fixture
async def broker(gateway: Gateway) -> AsyncIterator[AsyncBroker]:
    client = await gateway.client("sdk", EVERY_SCOPE)
    token = client.headers["authorization"].removeprefix("Bearer ")
    transport = httpx.ASGITransport(gateway.app)
    async with AsyncBroker("http://127.0.0.1:8470", token, retry_seconds=0, transport=transport) as broker:
        yield broker


async def given_as_soon_as_asked(gateway: Gateway) -> None:
    await gateway.plan(await gateway.next_task())


async def test_a_lease_is_held_within_its_block_and_given_back_at_its_end(
    gateway: Gateway, broker: AsyncBroker
) -> None:
    giving = asyncio.create_task(given_as_soon_as_asked(gateway))
    async with broker.lease(holder="server", gpu_mb=50 * GIB, priority=20) as held:
        await giving
        assert (held.node, held.device_uuids, held.notice) == ("n1", ("gpu0",), None)
        assert held.environment == {"CUDA_VISIBLE_DEVICES": "gpu0"}
        [listed] = [lease async for lease in broker.leases(state="held")]
        assert (listed.id, listed.holder) == (held.id, "server")
    assert (await broker.get_lease(held.id)).state is LeaseState.ENDED


async def test_its_holder_hears_the_notice_to_leave(gateway: Gateway, broker: AsyncBroker) -> None:
    giving = asyncio.create_task(given_as_soon_as_asked(gateway))
    async with broker.lease(gpu_mb=50 * GIB, priority=20) as held:
        await giving
        assert not await held.wait_for_notice(0)
        await broker.release_lease((await broker.ask_lease(gpu_mb=1)).id)
        await gateway.admin.post(f"/tasks/{held.id}/cancel")
        assert await before(PATIENCE_SECONDS, held.wait_for_notice())
        assert held.notice is not None
        assert (held.notice.reason, held.notice.deadline_at is not None) == ("cancel", True)
    assert (await broker.get_lease(held.id)).state is LeaseState.ENDED


async def test_what_is_not_given_in_time_is_no_longer_asked_for(
    gateway: Gateway, broker: AsyncBroker
) -> None:
    with pytest.raises(LeaseEnded, match=r"no memory was given within 0\.01 s"):
        async with broker.lease(gpu_mb=50 * GIB, timeout_seconds=0.01):
            pytest.fail("nobody gave it")
    [lease] = [lease async for lease in broker.leases()]
    assert lease.state is LeaseState.ENDED


async def test_a_lease_can_be_kept_by_hand(gateway: Gateway, broker: AsyncBroker) -> None:
    asked = await broker.ask_lease(gpu_mb=GIB, ttl_seconds=30, labels={"team": "chat"})
    assert (asked.state, asked.labels) == (LeaseState.PENDING, {"team": "chat"})
    assert str(asked.pid) not in asked.holder
    await gateway.plan(asked.id)
    gateway.clock.advance(10.0)
    renewed = await broker.renew_lease(asked, ttl_seconds=90)
    assert asked.deadline_at is not None
    assert renewed.deadline_at is not None
    assert (renewed.deadline_at - asked.deadline_at).total_seconds() == pytest.approx(70.0)
    assert (await broker.release_lease(asked)).state is LeaseState.ENDED
    with pytest.raises(Refused) as refused:
        await broker.renew_lease(asked)
    assert refused.value.code == "lease-ended"


def test_a_thread_renews_a_lease_that_is_held(service: RecordedService) -> None:
    held = a_lease(ttl_seconds=0.03)
    stopping = a_lease("stopping", notice={"reason": "preempt", "deadline_at": AT})
    service.told(
        Reply(202, a_lease("pending", ttl_seconds=0.03)),
        Reply(202, a_lease("pending", ttl_seconds=0.03)),
        Reply(200, a_lease("pending", ttl_seconds=0.03)),
        Reply(200, held),
        Reply(202, held),
        Reply(200, held),
        Reply(202, held),
        a_problem(409, "lease-under-notice"),
        Reply(200, stopping),
        Reply(200, a_lease("ended")),
    )
    with Broker(service.url, "gpb_secret") as broker, broker.lease(gpu_mb=1024) as lease:
        assert lease.wait_for_notice(PATIENCE_SECONDS)
        assert lease.notice is not None
        assert lease.notice.reason == "preempt"
    path = f"/leases/{FULL_ID}"
    assert [(asked.method, asked.path.removeprefix(path)) for asked in service.asked] == [
        ("POST", "/leases"),
        ("GET", "/wait"),
        ("POST", "/renew"),
        ("GET", "/wait"),
        ("GET", "/wait"),
        ("POST", "/renew"),
        ("GET", "/wait"),
        ("POST", "/renew"),
        ("GET", ""),
        ("DELETE", ""),
    ]


def test_a_holder_that_cannot_ask_any_longer_has_to_leave(service: RecordedService) -> None:
    service.told(Reply(202, a_lease(ttl_seconds=0.01)), *[a_problem(503, "store-unavailable")] * 20)
    with Broker(service.url, "gpb_secret", retry_seconds=0.05) as broker:
        held = broker.lease(gpu_mb=1024)
        held.__enter__()
        assert held.wait_for_notice(PATIENCE_SECONDS)
        assert held.notice is not None
        assert held.notice.reason == "unreachable"
        service._replies.clear()
        service.told(*[Reply(200, a_lease("ended"))] * 3)
        held.__exit__(None, None, None)


def test_the_command_line_asks_shows_renews_and_releases(service: RecordedService, run: Run) -> None:
    service.told(Reply(202, a_lease("pending")))
    asked = run("lease ask --gpu-memory 1GiB --ttl 2m --node n1 --pid 7 --kind H100 --priority batch")
    assert asked.out.strip() == FULL_ID
    sent = service.asked[0].body
    assert sent.pop("holder")
    assert sent == {
        "gpu_mb": 1024,
        "ttl_seconds": 120.0,
        "node": "n1",
        "pid": 7,
        "kinds": ["H100"],
        "priority": "batch",
    }
    service.told(Reply(200, a_lease()), Reply(200, a_lease()), Reply(200, a_lease("ended")))
    assert "GPU-1 1.0 GiB" in run(f"lease show {FULL_ID}").out
    assert run(f"lease renew {FULL_ID} --ttl 90s").code == 0
    assert service.asked[-1].body == {"ttl_seconds": 90.0}
    assert run(f"lease release {FULL_ID}").code == 0
    assert service.asked[-1].method == "DELETE"


def test_the_list_of_leases_leaves_out_those_that_are_over(service: RecordedService, run: Run) -> None:
    quarantined = a_lease("quarantined", error={"kind": "not_released", "message": "it was not released"})
    items = [a_lease(), quarantined, a_lease("ended", holder="gone")]
    service.told(Reply(200, {"items": items}), Reply(200, {"items": items}), Reply(200, {"items": []}))
    told = run("lease list").out
    assert "it was not released" in told
    assert "gone" not in told
    assert "gone" in run("lease list --all").out
    assert "no leases" in run("lease list").out


def test_a_command_runs_with_its_gpus_and_its_exit_code_is_ours(service: RecordedService, run: Run) -> None:
    service.told(*[Reply(202, a_lease())] * 50_000)
    script = "import os, sys; print('on', os.environ['CUDA_VISIBLE_DEVICES'], flush=True); sys.exit(3)"
    ended = run("lease run --gpu-memory 1GiB --here --", sys.executable, "-c", script)
    assert ended.code == 3
    assert service.asked[0].body["pid"]
    assert service.asked[0].body["holder"].startswith(sys.executable)
    assert any(asked.method == "DELETE" for asked in service.asked)


def test_a_command_is_asked_to_leave_when_its_lease_is(service: RecordedService, run: Run) -> None:
    stopping = a_lease("stopping", notice={"reason": "preempt", "deadline_at": AT})
    service.told(Reply(202, a_lease()), Reply(200, stopping), Reply(200, a_lease("ended")))
    ended = run("lease run --gpu-memory 1GiB --", sys.executable, "-c", "import time; time.sleep(60)")
    assert ended.code == 128 + 15
    assert "has to be given back (preempt)" in ended.err


def test_a_lease_without_a_command_is_a_usage_error(service: RecordedService, run: Run) -> None:
    assert run("lease run --gpus 1").code == 2
    assert not service.asked
