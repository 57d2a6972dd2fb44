"""Two tenants of one cohort on real Ray: one borrows everything, the other takes its guarantee back."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from gpubroker import Broker

from tests.e2e.service_process import ServiceProcess, until

TENANTS = {
    "owner": {"cohort": "lab", "guaranteed_mb": 24_000},
    "guest": {"cohort": "lab", "guaranteed_mb": 10_000},
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    home = tmp_path_factory.mktemp("service") / "data"
    with ServiceProcess(home, ray={"spares": 3}, policy={"tenants": TENANTS}) as running:
        yield running


def broker_of(service: ServiceProcess, tenant: str) -> Broker:
    token = service.broker.create_token(tenant, scopes=["tasks:read", "tasks:write"], tenant=tenant)
    return Broker(url=service.url, token=token.token)


def held_mb(service: ServiceProcess, tenant: str) -> int:
    return next(told.held_mb for told in service.broker.tenants().items if told.name == tenant)


def steps_of(witness: Path) -> list[int]:
    return [int(line) for line in witness.read_text(encoding="utf-8").split()] if witness.exists() else []


def test_an_owner_takes_its_guarantee_back_from_who_borrowed_it_and_nobody_loses_work(
    service: ServiceProcess, tmp_path: Path
) -> None:
    guest, owner = broker_of(service, "guest"), broker_of(service, "owner")
    witnesses = [tmp_path / str(number) for number in range(3)]
    runs = [
        guest.submit(
            "tests.e2e.work:count",
            kwargs={"witness": str(witness), "steps": 300},
            gpu_mb=11_000,
            priority=69,
            grace_seconds=20,
        )
        for witness in witnesses
    ]
    until(lambda: all(len(steps_of(witness)) > 5 for witness in witnesses), "the guest has borrowed all")
    flag = tmp_path / "flag"
    held = {"witness": str(tmp_path / "held"), "until": str(flag)}
    claim = owner.submit("tests.e2e.work:hold", kwargs=held, gpu_mb=20_000, priority=45)
    until(lambda: owner.get(claim.id).state == "running", "the owner has what it is guaranteed")
    victims = [run.id for run in runs if guest.get(run.id).raw["preemptions"]]
    assert victims, "runs of a higher priority gave way"
    assert held_mb(service, "owner") == 20_000
    assert held_mb(service, "guest") >= 10_000
    flag.touch()
    owner.result(claim.id, timeout_seconds=30)
    for run, witness in zip(runs, witnesses, strict=True):
        assert guest.result(run.id, timeout_seconds=60) == list(range(300))
        assert steps_of(witness) == list(range(300))
