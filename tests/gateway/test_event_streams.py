"""Event streams: server-sent events of the log."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from gpubroker_server.core.domain.orders import Failure
from gpubroker_server.core.domain.policy import Cutoffs
from gpubroker_server.gateway.events import stream
from gpubroker_server.gateway.parts import AppParts
from gpubroker_server.http import subscriptions

from tests.builders import GIB, NOW
from tests.gateway.harness import Client, Gateway, before, fault, problem, until
from tests.gateway.listeners import Listener, listening
from tests.gateway.test_arrays import done, result, submitted
from tests.gateway.worker_stage import formed
from tests.patience import PATIENCE_SECONDS


async def logged(client: Client, path: str = "/events", **params: Any) -> list[dict[str, Any]]:
    """Return all events of the JSON form, page by page."""
    found: list[dict[str, Any]] = []
    after = 0
    while True:
        page = (await client.get(path, params={"limit": 500, **params, "after": after})).json()
        if page["next_after"] == after:
            return found
        found += page["items"]
        after = page["next_after"]


async def refused(client: Client, path: str = "/events", **options: Any) -> httpx.Response:
    """Return the answer to a request for a stream that must not be given."""
    headers = {"Accept": "text/event-stream", **options.pop("headers", {})}
    return await before(PATIENCE_SECONDS, client.get(path, headers=headers, **options))


async def test_stream_has_what_is_kept_and_then_what_is_committed(gateway: Gateway, api: Client) -> None:
    await gateway.end(await api.submit())
    async with listening(gateway, api) as listener:
        assert listener.status == 200
        assert listener.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert listener.headers["x-accel-buffering"] == "no"
        assert listener.headers["cache-control"] == "no-store"
        kept = await listener.through(gateway.world.position)
        await gateway.end(await api.submit())
        messages = kept + await listener.through(gateway.world.position)
        assert listener.body.startswith(b"retry: 3000\n\n")
    assert [message.data for message in messages] == await logged(api)
    assert all((m.id, m.event) == (m.data["position"], m.data["kind"]) for m in messages)


async def test_resumed_stream_has_no_gap_and_no_repetition(gateway: Gateway, api: Client) -> None:
    """A client that breaks off anywhere, while tasks run, and sends the last id that it has."""
    chosen = random.Random(7)
    seen, at = [], None
    for _ in range(12):
        async with listening(gateway, api, resumes_at=at) as listener:
            for _ in range(chosen.randrange(3)):
                await gateway.end(await api.submit())
            for _ in range(chosen.randrange(8)):
                if at == gateway.world.position:
                    break
                message = await listener.next()
                seen.append(message.data)
                at = message.id
    async with listening(gateway, api, resumes_at=at) as listener:
        seen += [message.data for message in await listener.through(gateway.world.position)]
    assert seen == await logged(api)


async def test_commits_during_the_replay_come_once(
    gateway: Gateway, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_PAGE_EVENTS", 2)
    for _ in range(5):
        await gateway.end(await api.submit())

    async def go_on() -> None:
        for _ in range(10):
            await gateway.end(await api.submit())

    submitting = asyncio.create_task(go_on())
    async with listening(gateway, api) as listener:
        await submitting
        messages = await listener.through(gateway.world.position)
    assert [message.data for message in messages] == await logged(api)


async def test_burst_beyond_the_queue_is_read_from_the_log(
    gateway: Gateway, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "MAX_QUEUED", 3)
    async with listening(gateway, api) as listener:
        messages = await listener.through(gateway.world.position)
        listener.takes.clear()
        for _ in range(4):
            await gateway.end(await api.submit())
        listener.takes.set()
        messages += await listener.through(gateway.world.position)
        assert [message.data for message in messages] == await logged(api)
        last = await api.submit()
        assert (await listener.next()).data["key"] == last


async def test_task_stream_ends_with_the_state_of_the_task(gateway: Gateway, api: Client) -> None:
    await api.submit()
    task = await api.submit()
    async with listening(gateway, api, f"/tasks/{task}/events") as listener:
        await gateway.end(task, failure=Failure("ValueError", "no", ""), is_gone=False)
        *messages, end = await listener.rest()
        assert listener.is_whole
    assert (end.id, end.event, end.data) == (None, "end", {"task": task, "state": "failed"})
    assert [m.data for m in messages] == await logged(api, f"/tasks/{task}/events")
    assert messages[-1].event == "task.failed"


async def test_stream_of_an_ended_task_is_its_log_and_the_end(gateway: Gateway, api: Client) -> None:
    task = await api.submit(resources={"gpu_mb": 1024})
    await gateway.end(task)
    path = f"/tasks/{task}/events"
    async with listening(gateway, api, path) as listener:
        *messages, end = await listener.rest()
    assert [message.data for message in messages] == await logged(api, path)
    assert end.data["state"] == "succeeded"
    async with listening(gateway, api, path, resumes_at=messages[-1].id) as listener:
        assert [message.event for message in await listener.rest()] == ["end"]
    async with listening(gateway, api, path, kind="lease.*") as listener:
        assert {message.event for message in await listener.rest()} == {
            "lease.reserved",
            "lease.held",
            "lease.releasing",
            "lease.released",
            "end",
        }


async def test_array_stream_ends_with_its_last_worker(gateway: Gateway, api: Client) -> None:
    seen = await submitted(api, (0, 1), max_parallel=2)
    first, last = (worker["id"] for worker in seen["workers"])
    path = f"/tasks/{first}/events"
    async with listening(gateway, api, path, kind="task.succeeded") as listener:
        await gateway.admit(last)
        await gateway.admit(first)
        await done(gateway, first, result(0), result(1))
        await gateway.end(first)
        assert (await listener.next()).data["key"] == first
        await gateway.end(last)
        assert [(m.event, m.data.get("key")) for m in await listener.rest()] == [
            ("task.succeeded", last),
            ("end", None),
        ]


async def test_worker_set_stream_ends_when_the_set_is_cancelled(gateway: Gateway, api: Client) -> None:
    seen = await formed(gateway, api, count=2)
    gateway.leads = True
    async with listening(gateway, api, f"/tasks/{seen['id']}/events") as listener:
        await api.post(f"/tasks/{seen['id']}/cancel", json={"grace_seconds": 1.0})
        end = (await listener.rest())[-1]
    assert end.data == {"task": seen["id"], "state": "cancelled"}


async def test_end_between_reading_states_and_log_is_noticed(
    gateway: Gateway, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event of the end is then read from the log, and comes a second time from the queue."""
    task, read_states = await api.submit(), stream.Followed.read_states

    async def end_after(followed: stream.Followed, parts: AppParts) -> None:
        await read_states(followed, parts)
        await gateway.end(task)

    monkeypatch.setattr(stream.Followed, "read_states", end_after)
    async with listening(gateway, api, f"/tasks/{task}/events") as listener:
        messages = await listener.rest()
    assert [m.event for m in messages][-2:] == ["task.succeeded", "end"]


FILTERS: dict[str, dict[str, Any]] = {
    "a kind": {"kind": "task.submitted"},
    "a subject": {"kind": "lease.*"},
    "kinds": {"kind": "task.succeeded,device.*"},
    "a label": {"label.team": "vision"},
    "labels": {"label.team": "vision", "label.run": "2"},
    "a tenant": {"tenant": "zeta"},
    "every tenant": {"tenant": "*"},
    "a label of a tenant": {"tenant": "zeta", "label.team": "vision"},
}


async def two_tenants(gateway: Gateway, api: Client) -> None:
    zeta = await gateway.client("zeta", tenant="zeta", max_priority=90)
    await gateway.end(await api.submit(labels={"team": "vision", "run": "1"}, resources={"gpu_mb": 1024}))
    await gateway.end(await api.submit(labels={"team": "vision", "run": "2"}))
    await gateway.end(await zeta.submit(labels={"team": "vision"}))
    await gateway.end(await zeta.submit())


@pytest.mark.parametrize("params", FILTERS.values(), ids=FILTERS.keys())
async def test_filters_mean_the_same_in_both_forms(
    gateway: Gateway, api: Client, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BEAT_SECONDS", 0.05)
    async with listening(gateway, api, **params) as listener:
        await two_tenants(gateway, api)
        live = [message.data for message in await listener.through(gateway.world.position)]
    async with listening(gateway, api, **params) as listener:
        kept = [message.data for message in await listener.through(gateway.world.position)]
    paged = await logged(api, **params)
    assert live == kept == paged
    assert 0 < len(paged) < gateway.world.position or params == {"tenant": "*"}
    newest = (await api.get("/events", params={**params, "last": 3})).json()["items"]
    assert newest == paged[-3:]


async def test_tasks_filter_names_tasks_arrays_and_sets(gateway: Gateway, api: Client) -> None:
    array = await submitted(api, (0, 1), max_parallel=2)
    await api.submit()
    task = await api.submit()
    wanted = {task, *(worker["id"] for worker in array["workers"])}
    params: dict[str, Any] = {"task": f"{task},{array['id']}", "kind": "task.submitted"}
    async with listening(gateway, api, **params) as listener:
        messages = await listener.through(gateway.world.position)
    assert {message.data["key"] for message in messages} == wanted
    assert [message.data for message in messages] == await logged(api, **params)
    problem(await api.get("/events", params={"task": "task_none"}), 404, "not-found")
    problem(await refused(api, params={"task": "task_none"}), 404, "not-found")


async def test_filters_that_make_no_sense_are_refused(gateway: Gateway, api: Client) -> None:
    assert "task.failed" in fault(await api.get("/events?kind=failed"), "query:kind")
    fault(await api.get("/events?kind=task.*,*"), "query:kind")
    fault(await api.get("/events?label=team"), "query:label")
    task = await api.submit()
    fault(await api.get(f"/tasks/{task}/events?tenant=zeta"), "query:tenant")
    fault(await api.get("/events?last=501"), "query:last")
    zeta = await gateway.client("zeta", "tasks:read", "cluster:read", tenant="zeta")
    problem(await refused(zeta, params={"tenant": "default"}), 403, "forbidden")
    problem(await zeta.get("/events?tenant=*"), 403, "forbidden")
    assert await logged(zeta, tenant="zeta") == []


VIEWERS: dict[str, tuple[str, ...]] = {
    "a tenant": ("tasks:read", "tasks:write"),
    "a tenant and the cluster": ("tasks:read", "tasks:write", "cluster:read"),
    "an admin": ("tasks:read", "tasks:write", "admin"),
}


@pytest.mark.parametrize("scopes", VIEWERS.values(), ids=VIEWERS.keys())
async def test_stream_shows_what_the_json_form_shows(
    gateway: Gateway, api: Client, scopes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BEAT_SECONDS", 0.05)
    viewer = await gateway.client("viewer", *scopes, tenant="zeta")
    async with listening(gateway, viewer) as listener:
        victim = await viewer.submit(resources={"gpu_mb": 60 * GIB}, priority=10)
        await gateway.admit(victim)
        preemptor = await api.submit(resources={"gpu_mb": 60 * GIB}, priority=90)
        gateway.clock.advance(1)
        await gateway.plan(preemptor)
        await api.post(f"/tasks/{preemptor}/cancel")
        messages = await listener.through(gateway.world.position)
        assert [message.data for message in messages] == await logged(viewer)
        assert ("device.seen" in {m.event for m in messages}) is (len(scopes) > 2)
        assert (preemptor in listener.body.decode()) is ("admin" in scopes)
        [notice] = [m.data for m in messages if m.event == "task.stopping" and m.data["key"] == victim]
        assert notice["fields"]["freeing_for"] == (preemptor if "admin" in scopes else None)
    problem(await refused(viewer, f"/tasks/{victim}0/events"), 404, "not-found")
    other = await gateway.client("other", "tasks:read", tenant="acme")
    problem(await refused(other, f"/tasks/{victim}/events"), 404, "not-found")
    problem(await refused(await gateway.client("none", "cluster:read")), 403, "forbidden")


async def test_stream_begins_with_the_newest_or_with_what_is_to_come(gateway: Gateway, api: Client) -> None:
    for _ in range(3):
        await gateway.end(await api.submit())
    whole = await logged(api)
    async with listening(gateway, api, last=2) as listener:
        messages = await listener.through(gateway.world.position)
        assert [message.data for message in messages] == whole[-2:]
    async with listening(gateway, api, last=0) as listener:
        assert await listener.through(gateway.world.position) == []
        task = await api.submit()
        assert (await listener.next()).data["key"] == task
    page = (await api.get("/events?last=0")).json()
    assert (page["items"], page["next_after"]) == ([], gateway.world.position)
    async with listening(gateway, api, f"/tasks/{task}/events", last=0) as listener:
        await gateway.admit(task)
        assert (await listener.next()).event == "task.admitted"


async def test_last_event_id_goes_before_the_query(gateway: Gateway, api: Client) -> None:
    for _ in range(3):
        await api.submit()
    whole = await logged(api)
    async with listening(gateway, api, last=1, after=1, resumes_at=len(whole) - 2) as listener:
        messages = await listener.through(gateway.world.position)
    assert [message.data for message in messages] == whole[-2:]
    refusal = await refused(api, headers={"Last-Event-ID": "task_1"})
    assert fault(refusal, "header:Last-Event-ID")
    assert (await api.get("/events", headers={"Last-Event-ID": "3"})).json()["items"] == whole


async def test_of_two_accepted_forms_the_first_is_given(gateway: Gateway, api: Client) -> None:
    task = await api.submit()
    await gateway.end(task)
    for accept, given in {
        "text/event-stream": "text/event-stream",
        "Text/Event-Stream;q=0.9, application/json": "text/event-stream",
        "*/*, text/event-stream": "text/event-stream",
        "application/json, text/event-stream": "application/json",
        "*/*": "application/json",
    }.items():
        answer = await api.get(f"/tasks/{task}/events", headers={"Accept": accept})
        assert answer.headers["content-type"].partition(";")[0] == given


async def test_pruned_position_is_gone_and_names_the_oldest(gateway: Gateway, api: Client) -> None:
    task = await api.submit()
    gateway.clock.advance(100)
    head = gateway.world.position
    await gateway.store.prune(gateway.term, Cutoffs(gateway.clock.now(), NOW, NOW, NOW, head))
    await api.submit()
    for path in ("/events", f"/tasks/{task}/events"):
        refusal = await refused(api, path, headers={"Last-Event-ID": "1"})
        assert f"kept is at {head + 1};" in problem(refusal, 410, "events-gone")["detail"]
        assert refusal.headers["oldest-event-id"] == str(head + 1)
        refusal = await refused(api, path, headers={"Last-Event-ID": str(head + 99)})
        assert f"the log is at {head + 1}" in problem(refusal, 410, "events-gone")["detail"]
    async with listening(gateway, api, resumes_at=head) as listener:
        assert (await listener.next()).id == head + 1


async def test_stream_ends_if_what_it_lacks_is_pruned(
    gateway: Gateway, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_PAGE_EVENTS", 1)
    for _ in range(5):
        await api.submit()
    head = gateway.world.position
    async with listening(gateway, api, resumes_at=1) as listener:
        listener.takes.clear()
        gateway.clock.advance(100)
        await gateway.store.prune(gateway.term, Cutoffs(gateway.clock.now(), NOW, NOW, NOW, head))
        listener.takes.set()
        assert len(await listener.rest()) < head - 1
        assert listener.is_whole
    refusal = await refused(api, headers={"Last-Event-ID": str(listener.bookmark or 1)})
    problem(refusal, 410, "events-gone")


async def test_slow_reader_is_disconnected(
    gateway: Gateway, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "STALL_SECONDS", 0.05)
    async with listening(gateway, api) as listener:
        await listener.through(gateway.world.position)
        listener.takes.clear()
        await api.submit()
        await listener.ended()
        assert not listener.is_whole, "only the connection's end says that it was cut off"
    assert len(gateway.parts.subscriptions) == 0


async def test_heartbeats_carry_the_position(
    gateway: Gateway, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of a rare kind of event resumes behind what it has no message of."""
    monkeypatch.setattr(stream, "BEAT_SECONDS", 0.01)
    async with listening(gateway, api, kind="fleet.*") as listener:
        task = await api.submit()
        await until(lambda: listener.bookmark == gateway.world.position)
        beats = listener.beats
        await until(lambda: listener.beats > beats + 2)
        assert task not in listener.body.decode()
        assert listener.body.endswith(b": heartbeat\nid: %d\n\n" % gateway.world.position)


async def test_stream_ends_with_its_token(
    gateway: Gateway, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BEAT_SECONDS", 0.01)
    viewer = await gateway.client("viewer", "tasks:read")
    async with listening(gateway, viewer) as listener:
        assert (await api.delete("/tokens/viewer")).status_code == 204
        await listener.rest()
        assert listener.is_whole


async def test_streams_end_cleanly_with_the_gateway(gateway: Gateway, api: Client) -> None:
    task = await api.submit()
    async with listening(gateway, api) as one, listening(gateway, api, f"/tasks/{task}/events") as other:
        for listener in (one, other):
            await listener.through(gateway.world.position)
        gateway.parts.subscriptions.close()
        for listener in (one, other):
            assert await listener.rest() == []
            assert listener.is_whole
            assert listener.bookmark == gateway.world.position
    async with listening(gateway, api) as late:
        assert await late.rest() == []
        assert late.is_whole
    assert len(gateway.parts.subscriptions) == 0


async def test_streams_end_if_their_gateway_missed_events(gateway: Gateway, api: Client) -> None:
    async with listening(gateway, api) as listener:
        await until(lambda: listener.beats)  # It has read the log, and waits for what is yet to come.
        await listener.through(gateway.world.position)
        gateway.hears = False
        await api.submit()
        gateway.parts.subscriptions.end_all()
        assert await listener.rest() == []
    async with listening(gateway, api, resumes_at=listener.bookmark) as listener:
        assert (await listener.next()).event == "task.submitted"


@asynccontextmanager
async def limited(**limits: int) -> AsyncIterator[Gateway]:
    async with Gateway(**limits) as gateway:
        yield gateway


async def test_open_streams_of_a_token_are_limited() -> None:
    async with limited(token_event_streams=2) as gateway:
        api, other = gateway.admin, await gateway.client("other")
        async with listening(gateway, api), listening(gateway, api):
            refusal = await refused(api)
            detail = problem(refusal, 429, "event-streams-full")["detail"]
            assert 'token "admin" has 2 event streams open' in detail
            assert "limits.token_event_streams" in detail
            assert refusal.headers["retry-after"] == "1"
            assert (await api.get("/events")).status_code == 200
            async with listening(gateway, other) as listener:
                assert listener.status == 200
                assert "\ngpubroker_event_streams 3.0\n" in (await api.get("/metrics")).text
        async with listening(gateway, api) as listener:
            assert listener.status == 200


async def test_open_streams_of_a_gateway_are_limited() -> None:
    async with limited(event_streams=2) as gateway:
        one, other = gateway.admin, await gateway.client("other")
        async with listening(gateway, one), listening(gateway, other):
            detail = problem(await refused(other), 429, "event-streams-full")["detail"]
            assert "2 event streams are open" in detail
            assert "limits.event_streams" in detail


async def test_streams_of_many_tasks_get_their_own_events_only(gateway: Gateway, api: Client) -> None:
    tasks = [await api.submit() for _ in range(20)]
    contexts = [listening(gateway, api, f"/tasks/{task}/events", last=0) for task in tasks]
    open_streams: list[Listener] = [await context.__aenter__() for context in contexts]
    for task in reversed(tasks):
        await gateway.end(task)
    for task, listener in zip(tasks, open_streams, strict=True):
        messages = await listener.rest()
        assert {m.data["key"] for m in messages if m.event.startswith("task.")} == {task}
        assert messages[-1].event == "end"
    for context in contexts:
        await context.__aexit__(None, None, None)
    assert len(gateway.parts.subscriptions) == 0
