"""Quarantine through SDK and command line: the list, and the release by an operator."""

import io
from typing import Any

import httpx
import pytest
from gpubroker import AsyncBroker, Refused
from gpubroker_server.core.domain.orders import NodeLost

from tests.builders import GIB
from tests.client.command_line import Run
from tests.client.recorded_service import FULL_ID, RecordedService, Reply, a_task
from tests.gateway.harness import Gateway

STUCK: dict[str, Any] = {
    "id": FULL_ID,
    "name": "train",
    "kind": "run",
    "tenant": "default",
    "attempt": 2,
    "rank": 0,
    "node": "n2",
    "node_ready": False,
    "gpu_mb": 8192,
    "devices": [{"uuid": "GPU-1", "index": 0, "gpu_mb": 8192, "measured_mb": 0}],
    "quarantined_at": "2026-11-21T10:02:11.412Z",
    "awaits": ["agent_restarted", "statement"],
    "message": "n2 does not answer: waits until an agent answers there",
}
ANOTHERS = {**STUCK, "id": None, "name": None, "tenant": "vision", "kind": "gang_member", "rank": 3}
LISTED = Reply(200, {"items": [STUCK, ANOTHERS]})
GIVEN_BACK = Reply(200, {"id": FULL_ID, "gpu_mb": 8192, "devices": ["GPU-1"], "quarantine": []})


async def test_the_sdk_lists_and_releases_quarantine() -> None:
    async with Gateway() as gateway:
        token = (await gateway.client("sdk")).headers["authorization"].removeprefix("Bearer ")
        transport = httpx.ASGITransport(gateway.app)
        async with AsyncBroker("http://127.0.0.1:8470", token, transport=transport) as broker:
            task = await broker.submit("myteam.training:fit", gpu_mb=8 * GIB)
            await gateway.admit(task.id)
            node = next(iter(gateway.world.nodes.values()))
            await gateway.hear(NodeLost(node.name, node.incarnation, gateway.clock.now(), "no beat"))
            [one] = (await broker.quarantine()).items
            assert (one.id, one.attempt, one.node, one.node_ready) == (task.id, 1, "n1", False)
            assert (one.devices[0].uuid, one.awaits[-1]) == ("gpu0", "statement")
            assert one.quarantined_at is not None
            assert [of_task.raw for of_task in (await broker.get(task)).quarantine] == [one.raw]
            [holder] = (await broker.gpus()).items[0].holders
            assert holder.quarantine is not None
            with pytest.raises(Refused) as refused:
                await broker.release_quarantine(task, "looked", ranks=[1])
            assert refused.value.code == "nothing-quarantined"
            released = await broker.release_quarantine(task, "looked", attempts=[1], devices=["gpu0"])
            assert (released.gpu_mb, released.quarantine) == (8 * GIB, ())
            assert (await broker.quarantine()).items == ()


def test_quarantine_lists_holder_node_time_and_awaited_proof(service: RecordedService, run: Run) -> None:
    service.reply_with(LISTED, Reply(200, {"items": []}), LISTED)
    shown = run("quarantine")
    assert (shown.code, shown.err) == (0, "")
    for text in (FULL_ID, "train", "n2", "8.0 GiB", STUCK["message"], "(tenant vision)", "2 rank 3"):
        assert text in shown.out
    assert run("quarantine").out == "nothing is in quarantine\n"
    assert [one["id"] for one in run("quarantine -o json").json] == [FULL_ID, None]


def test_a_task_and_a_gpu_show_their_quarantine(service: RecordedService, run: Run) -> None:
    holder = {"kind": "run", "id": FULL_ID, "name": "train", "gpu_mb": 8192, "quarantine": STUCK}
    gpu = {
        "key": "k",
        "uuid": "GPU-1",
        "node": "n2",
        "kind": "sim",
        "physical_mb": 24576,
        "holders": [holder],
    }
    service.reply_with(Reply(200, a_task(FULL_ID, quarantine=[STUCK])), Reply(200, {"items": [gpu]}))
    assert "! 8.0 GiB of attempt 2, for " in run(f"show {FULL_ID}").out
    assert f"train 8.0 GiB (! in quarantine: {STUCK['message']})" in run("gpus").out


def test_a_release_names_what_it_states_and_covers_only_what_was_shown(
    service: RecordedService, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.reply_with(LISTED, GIVEN_BACK)
    monkeypatch.setattr("sys.stdin", answering("y\n"))
    ended = run("quarantine release train --because", "pulled its plug")
    assert ended.code == 0
    assert f"every process of {FULL_ID} train, attempt 2, on n2: 8.0 GiB" in ended.err
    assert "because 'pulled its plug'" in ended.err
    assert f"released 8.0 GiB of {FULL_ID}" in ended.out
    request = service.requests[-1]
    assert request.path == f"/quarantine/{FULL_ID}/release"
    assert request.body == {"reason": "pulled its plug", "attempts": [2]}


def test_without_confirmation_nothing_is_released(
    service: RecordedService, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.reply_with(LISTED, LISTED)
    monkeypatch.setattr("sys.stdin", answering("n\n"))
    assert run(f"quarantine release {FULL_ID[-8:]} --because looked").code == 6
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    ended = run("quarantine release train --because looked")
    assert (ended.code, "use --yes" in ended.err) == (2, True)
    assert [request.method for request in service.requests] == ["GET", "GET"]


def test_yes_skips_the_question_and_options_narrow_the_release(service: RecordedService, run: Run) -> None:
    service.reply_with(LISTED, GIVEN_BACK)
    ended = run("quarantine release train --yes --because looked --rank 0 --device GPU-1 --attempt 2")
    assert (ended.code, ended.err) == (0, "")
    body = {"reason": "looked", "attempts": [2], "ranks": [0], "devices": ["GPU-1"]}
    assert service.requests[-1].body == body


def test_an_unknown_or_ambiguous_holder_is_refused(service: RecordedService, run: Run) -> None:
    other = {**STUCK, "id": f"{FULL_ID[:-1]}z"}
    service.reply_with(LISTED, Reply(200, {"items": [STUCK, other]}))
    ended = run("quarantine release unknown --yes --because looked")
    assert (ended.code, "nothing of 'unknown' is in quarantine" in ended.err) == (6, True)
    ended = run("quarantine release train --yes --because looked")
    assert (ended.code, "is ambiguous" in ended.err) == (6, True)


def answering(text: str) -> io.StringIO:
    """A terminal with this input."""
    typed = io.StringIO(text)
    typed.isatty = lambda: True  # type: ignore[method-assign]
    return typed
