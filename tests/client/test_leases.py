"""GPU memory for programs that the broker does not start, in the SDK and on the command line."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Any

import httpx
import pytest
from gpubroker import AsyncBroker, Broker, BrokerError, LeaseEnded, LeaseState, Refused
from gpubroker.leases.lease import LeaseStatus
from gpubroker.transport.decoding import decode
from gpubroker.transport.exchange import Answer, Pause
from gpubroker.wire.leases import Lease
from gpubroker_server.http.identity import EVERY_SCOPE

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


async def test_a_lease_is_held_inside_its_block_and_released_at_its_end(
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


async def test_a_holder_gets_the_notice_to_leave(gateway: Gateway, broker: AsyncBroker) -> None:
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


async def test_a_lease_that_is_not_given_in_time_is_released(gateway: Gateway, broker: AsyncBroker) -> None:
    with pytest.raises(LeaseEnded, match=r"no memory was given within 0\.01 s"):
        async with broker.lease(gpu_mb=50 * GIB, timeout_seconds=0.01):
            pytest.fail("the lease was given")
    [lease] = [lease async for lease in broker.leases()]
    assert lease.state is LeaseState.ENDED


async def test_a_lease_can_be_renewed_and_released_explicitly(gateway: Gateway, broker: AsyncBroker) -> None:
    lease = await broker.ask_lease(gpu_mb=GIB, ttl_seconds=30, labels={"team": "chat"})
    assert (lease.state, lease.labels) == (LeaseState.PENDING, {"team": "chat"})
    assert str(lease.pid) not in lease.holder
    await gateway.plan(lease.id)
    gateway.clock.advance(10.0)
    renewed = await broker.renew_lease(lease, ttl_seconds=90)
    assert lease.deadline_at is not None
    assert renewed.deadline_at is not None
    assert (renewed.deadline_at - lease.deadline_at).total_seconds() == pytest.approx(70.0)
    assert (await broker.release_lease(lease)).state is LeaseState.ENDED
    with pytest.raises(Refused) as refused:
        await broker.renew_lease(lease)
    assert refused.value.code == "lease-ended"


def test_a_thread_renews_a_lease_that_is_held(service: RecordedService) -> None:
    held = a_lease(ttl_seconds=0.03)
    stopping = a_lease("stopping", notice={"reason": "preempt", "deadline_at": AT})
    service.reply_with(
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
    assert [(request.method, request.path.removeprefix(path)) for request in service.requests] == [
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


def test_a_holder_keeps_its_lease_while_the_service_is_unreachable(service: RecordedService) -> None:
    service.reply_with(Reply(202, a_lease(ttl_seconds=0.01)))
    service.always = a_problem(503, "store-unavailable")
    with Broker(service.url, "gpb_secret", retry_seconds=0) as broker, broker.lease(gpu_mb=1024) as held:
        wait_until(lambda: held.is_unreachable)
        assert held.notice is None
        stopping = a_lease("stopping", notice={"reason": "deadline", "deadline_at": AT})
        service.always = Reply(200, stopping)
        assert held.wait_for_notice(PATIENCE_SECONDS)
        assert not held.is_unreachable
        assert held.notice is not None
        assert held.notice.reason == "deadline"


def test_a_refused_renewal_is_a_notice(service: RecordedService) -> None:
    service.reply_with(Reply(202, a_lease()), a_problem(401, "unauthenticated"), Reply(200, a_lease("ended")))
    with Broker(service.url, "gpb_secret", retry_seconds=0) as broker, broker.lease(gpu_mb=1024) as held:
        assert held.wait_for_notice(PATIENCE_SECONDS)
        assert held.notice is not None
        assert held.notice.reason == "refused"
        assert held.fault is not None
        assert held.fault.code == "unauthenticated"


def test_closing_the_broker_first_is_a_notice(service: RecordedService) -> None:
    service.reply_with(Reply(202, a_lease(ttl_seconds=0.01)))
    service.always = Reply(200, a_lease(ttl_seconds=0.01))
    broker = Broker(service.url, "gpb_secret", retry_seconds=0)
    held = broker.lease(gpu_mb=1024)
    held.__enter__()
    broker.close()
    assert held.wait_for_notice(PATIENCE_SECONDS)
    assert held.fault is not None
    assert held.fault.code == "closed"
    with pytest.raises(BrokerError, match="this Broker is closed"):
        held.__exit__(None, None, None)


@pytest.mark.parametrize("status", [401, 403, 404, 429])
def test_a_proxys_refusal_is_not_a_notice(service: RecordedService, status: int) -> None:
    service.reply_with(Reply(202, a_lease(ttl_seconds=0.01)))
    service.always = Reply(status, "<html>nginx</html>")
    with Broker(service.url, "gpb_secret", retry_seconds=0) as broker, broker.lease(gpu_mb=1024) as held:
        wait_until(lambda: held.is_unreachable or held.notice)
        assert held.notice is None
        service.always = Reply(200, a_lease("ended"))
        assert held.wait_for_notice(PATIENCE_SECONDS)


def test_early_answers_without_news_are_followed_by_a_pause(service: RecordedService) -> None:
    """A service that is stopping, or a proxy that cuts long answers short, does that."""
    lease = decode(Lease, a_lease())
    steps = Broker("http://127.0.0.1:1", retry_seconds=0)._keep(LeaseStatus(lease))
    next(steps)
    assert steps.send(Answer(202, {}, json.dumps(a_lease()).encode())) == Pause(1.0)


def test_a_pending_lease_has_an_expected_start() -> None:
    start = {"p50_at": AT, "p90_at": AT, "p50_seconds": 1.0, "p90_seconds": 2.0, "n": 3, "basis": "learned"}
    pending = {"reason": "WaitingForMemory", "message": "it waits", "position": 1, "start": start}
    lease = decode(Lease, a_lease("pending", pending=pending))
    assert lease.pending is not None
    assert lease.pending.start is not None
    assert lease.pending.start.p50_at == datetime.fromisoformat(AT)


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_lease_commands_ask_show_renew_and_release(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(202, a_lease("pending")))
    ended = run("lease ask --gpu-memory 1GiB --ttl 2m --node n1 --pid 7 --kind H100 --priority batch")
    assert ended.out.strip() == FULL_ID
    sent = service.requests[0].body
    assert sent.pop("holder")
    assert sent == {
        "gpu_mb": 1024,
        "ttl_seconds": 120.0,
        "node": "n1",
        "pid": 7,
        "kinds": ["H100"],
        "priority": "batch",
    }
    service.reply_with(Reply(200, a_lease()), Reply(200, a_lease()), Reply(200, a_lease("ended")))
    assert "GPU-1 1.0 GiB" in run(f"lease show {FULL_ID}").out
    assert run(f"lease renew {FULL_ID} --ttl 90s").code == 0
    assert service.requests[-1].body == {"ttl_seconds": 90.0}
    assert run(f"lease release {FULL_ID}").code == 0
    assert service.requests[-1].method == "DELETE"


def test_lease_list_leaves_out_ended_leases(service: RecordedService, run: Run) -> None:
    quarantined = a_lease("quarantined", error={"kind": "not_released", "message": "it was not released"})
    service.reply_with(Reply(200, {"items": [a_lease(), quarantined]}), Reply(200, {"items": []}))
    assert "it was not released" in run("lease list").out
    assert "no leases" in run("lease list --all").out
    assert [request.params for request in service.requests] == [
        [("state", "pending,held,stopping,quarantined")],
        [],
    ]


@pytest.mark.parametrize("word", ["vllm", FULL_ID[-8:], FULL_ID[5:20]])
def test_a_lease_is_found_by_a_part_of_its_id_or_its_holder(
    service: RecordedService, run: Run, word: str
) -> None:
    listed = {"items": [a_lease(), a_lease(id="task_01k9z6x8d2000000000000000a", holder="another")]}
    service.reply_with(Reply(200, {"items": []}), Reply(200, listed), Reply(200, a_lease("ended")))
    assert run(f"lease release {word}").code == 0
    assert service.requests[-1].path == f"/leases/{FULL_ID}"


def test_an_ended_lease_of_the_same_holder_does_not_count(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(200, {"items": [a_lease()]}), Reply(200, a_lease("ended")))
    assert run("lease release vllm").code == 0
    listed, released = service.requests
    assert listed.params == [("state", "pending,held,stopping,quarantined"), ("holder", "vllm")]
    assert released.path == f"/leases/{FULL_ID}"


def test_an_ambiguous_or_unknown_lease_is_refused(service: RecordedService, run: Run) -> None:
    listed = {"items": [a_lease(), a_lease(id=f"{FULL_ID[:-1]}a")]}
    service.reply_with(Reply(200, listed), Reply(200, {"items": []}), Reply(200, listed))
    service.always = Reply(403, {"code": "forbidden", "detail": "a list of other tenants' leases"})
    assert "is ambiguous" in run("lease release vllm").err
    assert "no lease is held by 'unknown'" in run("lease release unknown").err
    assert {request.method for request in service.requests} == {"GET"}
