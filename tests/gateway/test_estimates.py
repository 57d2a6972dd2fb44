"""What past runs took, and what is made of it for the next."""

import pytest

from service.core.estimate import Lesson, Topic, What, sketch_of
from service.core.plan import Decision
from service.core.units import Instant
from tests.builders import GIB, NOW
from tests.gateway.harness import Client, Gateway


async def learn(
    gateway: Gateway,
    what: What,
    *values: float,
    subject: str = "resnet",
    tenant: str = "default",
    kind: str = "H100",
) -> None:
    """Runs of this subject took so much."""
    topic = Topic(tenant, subject, kind, what)
    for end in range(1, len(values) + 1):
        lesson = Lesson(topic, values[end - 1], sketch_of(values[:end]), Instant(NOW))
        await gateway.commit(Decision("run", "ended", lessons=(lesson,)))


async def test_estimates_are_told_by_subject_and_kind(gateway: Gateway, api: Client) -> None:
    await learn(gateway, What.GPU_MB, *[float(n * GIB) for n in range(1, 11)])
    await learn(gateway, What.SECONDS, 60.0, 60.0, 120.0)
    await learn(gateway, What.SECONDS, 1.0, subject="tools:resize", kind="")
    resnet, resize = (await api.get("/estimates")).json()["items"]
    assert (resnet["subject"], resnet["kind"]) == ("resnet", "H100")
    assert (resnet["gpu_mb"]["n"], resnet["seconds"]["n"]) == (10, 3)
    assert resnet["gpu_mb"]["p50"] == pytest.approx(5 * GIB, rel=0.02)
    assert resnet["gpu_mb"]["p95"] == pytest.approx(9 * GIB, rel=0.02)
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
async def test_a_task_is_like_others_of_its_model_type_else_name_else_entrypoint(
    gateway: Gateway, api: Client, fields: dict[str, object], subject: str
) -> None:
    task_id = await api.submit(**fields)  # type: ignore[arg-type]  # `run` is one of them
    assert gateway.task(task_id).subject == subject
