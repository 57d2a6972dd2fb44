"""While a service is upgraded, what an earlier leader would drop or do wrong is refused, and nothing else."""

import pytest

from tests.gateway.harness import Gateway, a_body, problem

OLD = ("", "0.2.9")
ARRAY = {"run": {"entrypoint": "myteam.jobs:f"}, "items": [1, 2]}
OBJECT = {"run": {"entrypoint": "myteam.jobs:f", "args": [{"object": "0a" * 32}]}}
NAMED = {**a_body(), "env": {"SEED": "secret:WANDB"}}


@pytest.mark.parametrize("release", OLD)
async def test_request_an_earlier_leader_does_not_know_is_refused_unstored(
    gateway: Gateway, release: str
) -> None:
    admin, gateway.leader_release = gateway.admin, release
    await gateway.secrets.put("default", "WANDB", "x")
    before = gateway.world.position
    for path, body in (
        ("/arrays", ARRAY),
        ("/worker-sets", {"run": {"entrypoint": "myteam.jobs:C"}}),
        ("/tasks", NAMED),
        ("/tasks", {**a_body(), "retry_on": ["timeout"]}),
        ("/tasks", OBJECT),
        ("/tenants/default/pause", {}),
        ("/streams/nightly/resume", {}),
        ("/streams/nightly/signals", {"quality": 0.5}),
        ("/nodes/n1/cordon", {}),
        ("/nodes/n1/drain", {}),
    ):
        refused = problem(await admin.post(path, json=body), 409, "leader-outdated")
        assert (
            "needs a leader of gpubroker 0.3.0 or later, and here:1, which leads, is of" in refused["detail"]
        )
        assert (release or "a release before 0.3.0") in refused["detail"]
    problem(await admin.post("/tasks/simulate", json=NAMED), 409, "leader-outdated")
    problem(await admin.put("/streams/night", json={"curriculum": 2}), 409, "leader-outdated")
    problem(await admin.delete("/streams/nightly"), 409, "leader-outdated")
    assert (gateway.world.position, dict(gateway.world.requests)) == (before, {})


async def test_the_stacks_of_a_run_need_a_leader_that_asks_for_them(gateway: Gateway) -> None:
    task = await gateway.admin.submit()
    await gateway.admit(task)
    gateway.leader_release = ""
    problem(await gateway.admin.get(f"/tasks/{task}/stack"), 409, "leader-outdated")


async def test_all_else_is_accepted_beside_an_earlier_leader(gateway: Gateway) -> None:
    gateway.leader_release = ""
    task = await gateway.admin.submit()
    assert (await gateway.admin.post(f"/tasks/{task}/cancel")).status_code == 202


@pytest.mark.parametrize("release", ["0.3.0.dev0", "0.3.0", "1.0"])
async def test_a_leader_of_this_release_or_a_later_one_gets_it(gateway: Gateway, release: str) -> None:
    gateway.leader_release = release
    assert (await gateway.admin.post("/arrays", json=ARRAY)).status_code == 202


async def test_while_none_leads_it_waits_for_the_next_leader(gateway: Gateway) -> None:
    gateway.leader_release, gateway.has_leader = "", False
    assert (await gateway.admin.post("/arrays", json=ARRAY)).status_code == 202
