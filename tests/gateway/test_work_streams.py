"""Work streams over HTTP: weights, signals, draws, and the tasks that name them."""

from typing import Any

import pytest

from tests.builders import NOW
from tests.gateway.harness import Client, Gateway, a_body, fault, problem


async def listed(client: Client) -> dict[str, Any]:
    return {it["name"]: it for it in (await client.get("/streams")).json()["items"]}


async def put(client: Client, name: str, weight: float) -> Any:
    response = await client.put(f"/streams/{name}", json={"curriculum": weight, "reason": "harder now"})
    assert response.status_code == 200
    return response.json()


async def signal(client: Client, name: str, **told: Any) -> Any:
    response = await client.post(f"/streams/{name}/signals", json=told)
    assert response.status_code == 200, response.text
    return response.json()


async def test_streams_of_the_settings_and_those_that_were_put_are_listed(
    gateway: Gateway, api: Client
) -> None:
    assert (await listed(api))["nightly"]["weight"] == 0.5
    made = await put(api, "ladder", 3.0)
    assert (made["name"], made["weight"], made["factors"]["curriculum"]) == ("ladder", 3.0, 3.0)
    found = await listed(api)
    assert [*found] == ["ladder", "nightly"]
    assert [it["probability"] for it in found.values()] == pytest.approx([0.05 + 0.9 * 6 / 7, 0.05 + 0.9 / 7])
    [note] = [note for note in gateway.store.audited() if note.subject == "ladder"]
    assert (note.action, note.actor, note.reason) == ("stream.put", "admin", "harder now")


async def test_signals_change_the_factors_that_are_shown(gateway: Gateway, api: Client) -> None:
    await signal(api, "nightly", progress=1000, progress_at="1970-01-02T00:00:00Z")
    before = len(gateway.store.audited())
    await signal(api, "nightly", progress=1000.0, data_age_seconds=3600, quality=0.5)
    gateway.clock.advance(3600.0)
    shown = await signal(api, "nightly", progress=1080)
    assert shown["factors"] == {
        "curriculum": 0.5, "velocity": pytest.approx(1.5057, rel=1e-4), "staleness": 3.0,
        "quality": pytest.approx(0.55),
    }  # fmt: skip
    assert shown["weight"] == pytest.approx(0.5 * 1.5057 * 3.0 * 0.55, rel=1e-4)
    assert (shown["progress"], shown["data_age_seconds"], shown["quality"]) == (1080.0, 7200.0, 0.5)
    assert len(gateway.store.audited()) == before


async def test_a_task_may_name_a_stream_that_was_put_until_it_is_deleted(
    gateway: Gateway, api: Client
) -> None:
    problem(await api.post("/tasks", json=a_body(stream="ladder")), 422, "validation-failed")
    await put(api, "ladder", 3.0)
    waits = await api.submit(stream="ladder")
    await api.post("/streams/ladder/pause", json={})
    assert (await listed(api))["ladder"]["paused"] is True
    await api.post("/streams/ladder/resume", json={})
    assert (await api.delete("/streams/ladder")).status_code == 204
    assert gateway.store.audited()[-1].action == "stream.delete"
    assert "ladder" not in await listed(api)
    problem(await api.post("/tasks", json=a_body(stream="ladder")), 422, "validation-failed")
    await gateway.admit(waits)


async def test_a_stream_of_the_settings_keeps_their_weight_when_it_is_deleted(api: Client) -> None:
    await put(api, "nightly", 8.0)
    await signal(api, "nightly", quality=0.0)
    assert (await api.delete("/streams/nightly")).status_code == 204
    assert (await listed(api))["nightly"]["weight"] == 0.5


async def test_draw_answers_the_stream_with_its_factors_and_is_repeated_by_seed(api: Client) -> None:
    await put(api, "ladder", 3.0)
    drawn = (await api.post("/streams/next", json={"seed": 7})).json()
    assert drawn == (await api.post("/streams/next", json={"seed": 7})).json()
    assert drawn["stream"] == (await listed(api))[drawn["stream"]["name"]]
    made = (await api.post("/streams/next")).json()
    assert made == (await api.post("/streams/next", json={"seed": made["seed"]})).json()
    names = [(await api.post("/streams/next", json={"seed": n})).json()["stream"]["name"] for n in range(60)]
    assert names.count("ladder") > names.count("nightly") > 0


async def test_paused_streams_are_not_drawn(api: Client) -> None:
    await put(api, "ladder", 1e-3)
    await api.post("/streams/nightly/pause", json={})
    names = {(await api.post("/streams/next", json={"seed": n})).json()["stream"]["name"] for n in range(9)}
    assert names == {"ladder"}
    await api.delete("/streams/ladder")
    assert "all are paused" in problem(await api.post("/streams/next"), 404, "not-found")["detail"]


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({}, ""),
        ({"progress_at": "2026-01-01T00:00:00Z"}, ""),
        ({"quality": 1.5}, "/quality"),
        ({"data_age_seconds": -1}, "/data_age_seconds"),
        ({"progress": 1e13}, "/progress"),
        ({"progress": 1, "progress_at": "2026-01-01T00:00:00"}, "/progress_at"),
    ],
)
async def test_a_signal_that_says_nothing_or_something_impossible_is_refused(
    api: Client, body: dict[str, Any], pointer: str
) -> None:
    fault(await api.post("/streams/nightly/signals", json=body), pointer)


@pytest.mark.parametrize(("name", "weight"), [("a%20b", 1.0), ("ladder", 5e-324), ("ladder", 1e7)])
async def test_a_bad_name_or_weight_is_refused(api: Client, name: str, weight: float) -> None:
    problem(await api.put(f"/streams/{name}", json={"curriculum": weight}), 422, "validation-failed")


async def test_a_misspelled_stream_is_refused_with_the_one_that_is_meant(api: Client) -> None:
    for answer in (
        await api.post("/streams/nightli/signals", json={"quality": 1}),
        await api.delete("/streams/nightli"),
    ):
        assert 'did you mean "nightly"?' in problem(answer, 404, "not-found")["detail"]


async def test_submitting_tokens_may_signal_and_draw_and_only_admins_set_weights(
    gateway: Gateway,
) -> None:
    trainer = await gateway.client("trainer", "tasks:read", "tasks:write", tenant="acme")
    await signal(trainer, "nightly", quality=0.5)
    assert (await trainer.post("/streams/next")).status_code == 200
    problem(await trainer.put("/streams/nightly", json={"curriculum": 9}), 403, "forbidden")
    problem(await trainer.delete("/streams/nightly"), 403, "forbidden")


async def test_what_no_leader_has_carried_out_is_stored(gateway: Gateway, api: Client) -> None:
    gateway.leads = False
    response = await api.put("/streams/ladder", json={"curriculum": 3.0})
    assert (response.status_code, response.json()["weight"]) == (202, 3.0)
    told = await api.post("/streams/nightly/signals", json={"quality": 0.5, "progress": 4})
    assert (told.status_code, told.json()["progress"]) == (202, None)
    await gateway.turn()
    assert (await listed(api))["nightly"]["progress"] == 4
    assert (await listed(api))["ladder"]["weight"] == 3.0
    gateway.leads = False
    assert (await api.delete("/streams/ladder")).status_code == 202


async def test_progress_may_come_late_with_its_time(gateway: Gateway, api: Client) -> None:
    gateway.clock.advance(60.0)
    shown = await signal(api, "nightly", progress=5, progress_at="2999-01-01T00:00:00Z")
    assert shown["progress_at"] is not None
    assert gateway.world.streams["nightly"].progress_at == NOW + 60.0
