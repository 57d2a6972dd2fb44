"""Two tenants of one cohort on real Ray: one borrows everything, the other takes its guarantee back."""

from pathlib import Path

from tests.e2e.service_process import ServiceProcess, until
from tests.patience import PATIENCE_SECONDS


def held_mb(service: ServiceProcess, tenant: str) -> int:
    return next(told.held_mb for told in service.broker.tenants().items if told.name == tenant)


def steps_of(witness: Path) -> list[int]:
    return [int(line) for line in witness.read_text(encoding="utf-8").split()] if witness.exists() else []


def test_owner_reclaims_its_guarantee_from_borrowers_and_no_work_is_lost(
    service: ServiceProcess, tmp_path: Path
) -> None:
    guest, owner = service.of("guest"), service.of("owner")
    witnesses, enough = [tmp_path / str(number) for number in range(3)], tmp_path / "enough"
    runs = [
        guest.submit(
            "tests.e2e.work:count",
            kwargs={"witness": str(witness), "enough": str(enough)},
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
    owner.result(claim.id, timeout_seconds=PATIENCE_SECONDS)
    until(lambda: all(guest.get(run).state == "running" for run in runs), "all are at work again")
    enough.touch()
    for run, witness in zip(runs, witnesses, strict=True):
        steps = guest.result(run.id, timeout_seconds=PATIENCE_SECONDS)
        assert steps == steps_of(witness) == list(range(len(steps)))
