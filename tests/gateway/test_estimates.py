"""What past runs used, and sizes that are learned from them."""

from typing import Any

import pytest
from gpubroker_server.core.admission.defaults import Defaults, NamedDefaults
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.estimates import Observation, SketchKey, What
from gpubroker_server.core.domain.units import Instant

from tests.builders import GIB, NOW, a_device, a_sketch, key
from tests.gateway.harness import Client, Gateway, a_body, fault


async def learn(
    gateway: Gateway,
    what: What,
    *values: float,
    subject: str = "resnet",
    tenant: str = "default",
    kind: str = "H100",
) -> None:
    """Store the measurements of runs of this subject."""
    topic = SketchKey(tenant, subject, kind, what)
    for end in range(1, len(values) + 1):
        lesson = Observation(topic, values[end - 1], a_sketch(values[:end]), Instant(NOW))
        await gateway.commit(Decision("run", "ended", lessons=(lesson,)))


async def test_estimates_are_listed_by_subject_and_kind(gateway: Gateway, api: Client) -> None:
    await learn(gateway, What.GPU_MB, *[float(n * GIB) for n in range(1, 11)])
    await learn(gateway, What.SECONDS, 60.0, 60.0, 120.0)
    await learn(gateway, What.SECONDS, 1.0, subject="tools:resize", kind="")
    resnet, resize = (await api.get("/estimates")).json()["items"]
    assert (resnet["subject"], resnet["kind"]) == ("resnet", "H100")
    assert (resnet["gpu_mb"]["n"], resnet["seconds"]["n"]) == (10, 3)
    assert resnet["gpu_mb"]["p50"] == pytest.approx(5 * GIB, rel=0.02)
    assert resnet["gpu_mb"]["p95"] == pytest.approx(10 * GIB, rel=0.02)
    assert resnet["seconds"]["p50"] == pytest.approx(60.0, rel=0.02)
    assert (resize["subject"], resize["kind"], resize["gpu_mb"]) == ("tools:resize", "", None)


async def test_estimates_can_be_asked_for_one_subject(gateway: Gateway, api: Client) -> None:
    await learn(gateway, What.SECONDS, 60.0)
    await learn(gateway, What.SECONDS, 1.0, subject="bert")
    found = (await api.get("/estimates", params={"subject": "bert"})).json()["items"]
    assert [item["subject"] for item in found] == ["bert"]


async def test_a_tenant_learns_from_its_own_runs_only(gateway: Gateway, api: Client) -> None:
    await learn(gateway, What.SECONDS, 60.0, tenant="vision")
    assert (await api.get("/estimates")).json() == {"items": []}
    other = await gateway.client("viewer", "tasks:read", tenant="vision")
    assert len((await other.get("/estimates")).json()["items"]) == 1
    assert (await (await gateway.client("nobody", "cluster:read")).get("/estimates")).status_code == 403


@pytest.mark.parametrize(
    ("fields", "subject"),
    [
        ({"model_type": "llm", "name": "nightly"}, "llm"),
        ({"name": "nightly"}, "nightly"),
        ({}, "myteam.training:train"),
        ({"run": {"command": ["ls"]}}, ""),
    ],
)
async def test_the_subject_of_a_task_is_its_model_type_else_name_else_entrypoint(
    gateway: Gateway, api: Client, fields: dict[str, object], subject: str
) -> None:
    task_id = await api.submit(**fields)  # type: ignore[arg-type]  # `run` is one of them
    assert gateway.task(task_id).subject == subject


async def test_a_size_is_learned_and_shown_with_its_basis(gateway: Gateway, api: Client) -> None:
    await learn(gateway, What.GPU_MB, *[8.0 * GIB] * 12)
    answer = await api.post(
        "/tasks", json=a_body(model_type="resnet", resources={"gpus": 1, "gpu_mb": "learned"})
    )
    task = answer.json()
    assert task["resources"]["gpu_mb"] == pytest.approx(1.15 * 8 * GIB, rel=0.02)
    assert task["sizing"]["gpu_mb"] == task["resources"]["gpu_mb"]
    assert task["sizing"]["p95_mb"] == pytest.approx(8 * GIB, rel=0.02)
    assert (task["sizing"]["n"], task["sizing"]["kind"]) == (12, "H100")
    assert (await api.get(f"/tasks/{task['id']}")).json()["sizing"] == task["sizing"]
    await gateway.admit(task["id"])
    assert gateway.world.ledgers[key("gpu0")].leased_mb() == task["resources"]["gpu_mb"]


async def test_a_size_does_not_change_with_what_is_learned_later(gateway: Gateway, api: Client) -> None:
    await learn(gateway, What.GPU_MB, *[8.0 * GIB] * 5)
    task_id = await api.submit(model_type="resnet", resources={"gpu_mb": "learned"})
    before = (await api.get(f"/tasks/{task_id}")).json()["resources"]
    await learn(gateway, What.GPU_MB, *[40.0 * GIB] * 20)
    assert (await api.get(f"/tasks/{task_id}")).json()["resources"] == before


async def test_with_too_few_runs_a_whole_device_is_given_and_the_answer_says_so(
    gateway: Gateway, api: Client
) -> None:
    await learn(gateway, What.GPU_MB, *[8.0 * GIB] * 4)
    task_id = await api.submit(model_type="resnet", resources={"gpu_mb": "learned"})
    task = (await api.get(f"/tasks/{task_id}")).json()
    assert (task["resources"]["gpus"], task["resources"]["gpu_mb"]) == (1, None)
    assert (task["sizing"]["gpu_mb"], task["sizing"]["n"]) == (None, 4)
    assert "it takes 5 to know its size" in task["sizing"]["message"]


async def test_a_size_is_learned_from_runs_on_devices_that_the_task_may_use(
    gateway: Gateway, api: Client
) -> None:
    await gateway.join(a_device(), a_device("gpu1", kind="L4", mb=24 * GIB))
    await learn(gateway, What.GPU_MB, *[8.0 * GIB] * 5)
    await learn(gateway, What.GPU_MB, *[4.0 * GIB] * 5, kind="L4")
    asked = {"gpu_mb": "learned", "kinds": ["L4"]}
    task_id = await api.submit(model_type="resnet", resources=asked)
    sizing = (await api.get(f"/tasks/{task_id}")).json()["sizing"]
    assert (sizing["kind"], sizing["p95_mb"]) == ("L4", pytest.approx(4 * GIB, rel=0.02))


async def test_ranks_with_a_learned_size_may_stand_beside_ranks_without(
    gateway: Gateway, api: Client
) -> None:
    await learn(gateway, What.GPU_MB, *[8.0 * GIB] * 12)
    resources = {"bundles": [{"count": 2, "gpu_mb": "learned"}, {"gpu_mb": 1024}, {"cpu": 2}]}
    asked = await api.post("/tasks/simulate", json=a_body(model_type="resnet", resources=resources))
    task = (await api.post("/tasks", json=a_body(model_type="resnet", resources=resources))).json()
    learned, stated, without = task["resources"]["bundles"]
    assert learned["gpu_mb"] == pytest.approx(1.15 * 8 * GIB, rel=0.02)
    assert (learned["count"], stated["gpu_mb"], without["gpus"]) == (2, 1024, 0)
    assert task["sizing"]["gpu_mb"] == learned["gpu_mb"]
    assert (task["sizing"]["n"], task["sizing"]) == (12, asked.json()["sizing"])


async def test_ranks_that_may_use_different_kinds_have_sizes_of_their_own(
    gateway: Gateway, api: Client
) -> None:
    await gateway.join(a_device(), a_device("gpu1", kind="L4", mb=24 * GIB))
    await learn(gateway, What.GPU_MB, *[8.0 * GIB] * 5)
    await learn(gateway, What.GPU_MB, *[4.0 * GIB] * 5, kind="L4")
    bundles = [{"gpu_mb": "learned", "kinds": [kind]} for kind in ("H100", "L4")]
    task_id = await api.submit(model_type="resnet", resources={"bundles": bundles})
    task = (await api.get(f"/tasks/{task_id}")).json()
    sizes = [bundle["gpu_mb"] for bundle in task["resources"]["bundles"]]
    assert sizes == [pytest.approx(1.15 * mb * GIB, rel=0.02) for mb in (8, 4)]
    assert task["sizing"]["gpu_mb"] == sizes[0]
    assert "rank 0: 95 of 100 runs of resnet" in task["sizing"]["message"]
    assert "; rank 1: 95 of 100 runs of resnet" in task["sizing"]["message"]


async def test_with_too_few_measured_ranks_each_gets_whole_devices(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(model_type="resnet", resources={"bundles": [{"gpu_mb": "learned"}]})
    task = (await api.get(f"/tasks/{task_id}")).json()
    [rank] = task["resources"]["bundles"]
    assert (rank["gpus"], rank["gpu_mb"], task["sizing"]["gpu_mb"]) == (1, None, None)


async def test_a_model_type_may_default_to_the_learned_size() -> None:
    types = {"resnet": NamedDefaults(gpu_mb="learned")}
    async with Gateway() as gateway:
        gateway.change(defaults=Defaults(model_types=types))
        api = await gateway.client("anybody")
        await learn(gateway, What.GPU_MB, *[8.0 * GIB] * 5)
        silent = await api.submit(model_type="resnet")
        counted = await api.submit(model_type="resnet", resources={"gpus": 1})
        said = [(await api.get(f"/tasks/{task_id}")).json() for task_id in (silent, counted)]
        gangs = [
            await api.submit(model_type="resnet", resources={"bundles": bundles})
            for bundles in ([{"cpu": 2}], [{"kinds": ["H100"]}, {"cpu": 2}], [{"gpus": 1}, {"cpu": 2}])
        ]
        ranks = [
            [
                rank["gpu_mb"] or rank["gpus"]
                for rank in (await api.get(f"/tasks/{id}")).json()["resources"]["bundles"]
            ]
            for id in gangs
        ]
    assert said[0]["resources"]["gpus"] == 1
    assert said[0]["resources"]["gpu_mb"] == pytest.approx(1.15 * 8 * GIB, rel=0.02)
    assert (said[1]["resources"]["gpus"], said[1]["resources"]["gpu_mb"]) == (1, None)
    size = said[0]["resources"]["gpu_mb"]
    assert ranks == [[size], [size, 0], [1, 0]]


async def test_a_stated_size_has_no_sizing(api: Client) -> None:
    task_id = await api.submit(resources={"gpu_mb": 1024})
    assert (await api.get(f"/tasks/{task_id}")).json()["sizing"] is None


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "resnet", "resources": {"gpus": 1}},
        {"model_type": "resnet", "resources": {"gpus": 1, "exclusive": True}},
        {"model_type": "resnet", "resources": {"exclusive": True}},
        {"model_type": "resnet", "resources": {"kinds": ["H100"]}},
        {"name": "resnet", "resources": {"gpus": 1}},
    ],
)
async def test_gpus_without_a_size_stay_whole_whatever_is_known_of_runs_like_it(
    gateway: Gateway, api: Client, fields: dict[str, Any]
) -> None:
    await learn(gateway, What.GPU_MB, *[8.0 * GIB] * 12)
    task = (await api.get(f"/tasks/{await api.submit(**fields)}")).json()
    assert (task["resources"]["gpu_mb"], task["sizing"]) == (None, None)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"resources": {"gpus": 1}}, "it takes whole GPUs, because it states no size; state gpu_mb, or"),
        ({"model_type": "new", "resources": {"gpus": 1}}, "it takes whole GPUs, because it states no size"),
        ({"model_type": "new", "resources": {"gpu_mb": "learned"}}, "it gets whole GPUs: 0 runs of new have"),
    ],
)
async def test_a_dry_run_says_when_a_whole_gpu_will_be_taken_and_why(
    api: Client, fields: dict[str, Any], says: str
) -> None:
    answer = (await api.post("/tasks/simulate", json=a_body(**fields))).json()
    assert answer["sizing"]["message"].startswith(says)


async def test_a_dry_run_of_a_stated_size_says_nothing_about_it(api: Client) -> None:
    for resources in ({"gpu_mb": 1024}, {"gpu_fraction": 0.5}, {"gpus": 1, "exclusive": True}, {"cpu": 1}):
        answer = (await api.post("/tasks/simulate", json=a_body(resources=resources))).json()
        assert answer["sizing"] is None


async def test_only_the_word_learned_may_stand_for_a_size(api: Client) -> None:
    response = await api.post("/tasks", json=a_body(resources={"gpu_mb": "guess"}))
    assert fault(response, "/resources/gpu_mb") == 'must be a whole number; found "guess"'


async def test_a_run_shows_when_it_is_likely_to_end(gateway: Gateway, api: Client) -> None:
    await learn(gateway, What.SECONDS, 10.0, 100.0, 200.0, 300.0)
    task_id = await api.submit(model_type="resnet", resources={"gpu_mb": 1024})
    assert (await api.get(f"/tasks/{task_id}")).json()["eta"] is None
    await gateway.admit(task_id)
    gateway.clock.advance(50)
    eta = (await api.get(f"/tasks/{task_id}")).json()["eta"]
    assert eta["p50_seconds"] == pytest.approx(150.0, rel=0.05)
    assert eta["n"] == 3
    assert eta["p50_at"] < eta["p90_at"]
    [listed] = (await api.get("/tasks")).json()["items"]
    assert listed["eta"] == eta
    await gateway.end(task_id)
    assert (await api.get(f"/tasks/{task_id}")).json()["eta"] is None
