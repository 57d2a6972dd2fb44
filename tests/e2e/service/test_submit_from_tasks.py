"""Tasks that submit others, with a token that is worth nothing after their end."""

import pytest
from gpubroker import Broker, Refused, TaskFailed

from tests.e2e.service_process import ServiceProcess
from tests.patience import PATIENCE_SECONDS

WORK = "tests.e2e.work:submit_another"


@pytest.mark.parametrize("cpu", [0.2, 1.0], ids=["in a shared process", "in a process of its own"])
def test_a_task_submits_another_one_of_its_tenant_until_it_ends(service: ServiceProcess, cpu: float) -> None:
    acme = service.of("acme")
    parent = acme.submit(WORK, cpu=cpu)
    found = acme.result(parent.id, timeout_seconds=PATIENCE_SECONDS)
    assert found["sum"] == 42
    child = acme.get(found["child"])
    assert (child.state, child.raw["tenant"]) == ("succeeded", "acme")
    with Broker(found["url"], found["token"]) as later, pytest.raises(Refused) as refused:
        later.get(found["child"])
    assert refused.value.code == "unauthenticated"


def test_it_has_no_higher_priority_and_no_other_scope_than_its_own(broker: Broker) -> None:
    parent = broker.submit(WORK, kwargs={"priority": "critical"}, priority="batch", cpu=0.2)
    with pytest.raises(TaskFailed, match="priority"):
        broker.result(parent.id, timeout_seconds=PATIENCE_SECONDS)
