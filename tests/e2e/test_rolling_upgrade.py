"""Two gateways and two brokers are upgraded from the last release to this tree, in turn and under load."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from gpubroker import Broker
from gpubroker.errors import BrokerError
from gpubroker_server.adapters.sql.store import migrate

from tests.chaos.shutdown import Batch, GatewaysAndBrokersOnRay, stop_under_load
from tests.chaos.witness import Observer
from tests.e2e.released import THIS_TREE, command, unpacked
from tests.e2e.service_process import ROOT, BrokerProcess, GatewayProcess, ServiceProcess, environment, until
from tests.migrations.newer import CONTRACT, EXPAND, NEXT, migrate_as_newer_software_does
from tests.migrations.test_migrations import facts_of, looked_at, url

__all__ = ["url"]

STEPS = ("gateway", "gateway", "standby", "leader")
"""The order that docs/how-to/upgrade.md gives."""
BACK = ("leader", "standby", "gateway", "gateway")
ANSWERED_WITHIN_SECONDS = 1.0


class Site(GatewaysAndBrokersOnRay):
    """Of the last release at first."""

    def __init__(self, folder: Path, url: str, released: str) -> None:
        self._released = released
        super().__init__(folder, url)
        self._use = THIS_TREE
        self._moved: list[ServiceProcess] = []

    def process_of(self, process: type[ServiceProcess], name: str, **more: Any) -> ServiceProcess:
        kind = GatewayProcess if issubclass(process, GatewayProcess) else BrokerProcess
        made = super().process_of(kind, name, **more)
        made.use(self._released)
        return made

    def start(self) -> None:
        """Start the processes in turn. Processes of the last release that begin at once remove each other's
        probe of their data directory, and one of them then says that it cannot write there."""
        for process in (*self.gateways, *self.brokers):
            process.start()
        until(lambda: self.broker_which(leads=True) is not None, "one of the brokers leads")

    def go_back(self) -> None:
        """From now on."""
        self._use, self._moved = self._released, []
        self.kills.clear()
        (self.folder / "held").rename(self.folder / "held-before")
        self.observer = Observer(self.folder / "witness", self.folder / "seen")

    def terminate(self, target: str, chance: Random) -> None:
        """The next one in the order of the upgrade, whatever target was drawn."""
        target = (STEPS if self._use == THIS_TREE else BACK)[len(self._moved)]
        if target != "gateway":
            until(lambda: self.broker_which(leads=True) is not None, "one of the brokers leads")
        leader = self.broker_which(leads=True)
        kind = self.gateways if target == "gateway" else self.brokers
        left = [one for one in kind if one not in self._moved]
        process = min(left, key=lambda one: (one is leader) is not (target == "leader"))
        assert process.terminate() == 0, process.log()
        process.use(self._use)
        process.start()
        self._moved.append(process)
        self._count(target)


def move_all(site: Site, seed: int, tasks_per_step: int, every_seconds: float) -> Mapping[str, Any]:
    found = stop_under_load(site, Batch(seed, 4, tasks_per_step, STEPS, every_seconds))
    print(f"{found['acknowledged']} tasks; slowest answer {found['slowest_answer_seconds']:.3f} s")
    assert found["stops"] == {"gateway": 2, "leader": 1, "standby": 1}
    assert found["wrong"] == []
    assert (found["lost"], found["accepted_twice"], found["restarted_runs"]) == (0, 0, 0)
    return found


@pytest.fixture
def released(tmp_path: Path) -> str:
    return unpacked(tmp_path / "released")


def test_every_process_is_upgraded_under_load_with_nothing_lost_or_redone(
    tmp_path: Path, released: str, empty_postgres_url: str
) -> None:
    (tmp_path / "site").mkdir()
    site = Site(tmp_path / "site", empty_postgres_url, released)
    try:
        site.start()
        move_all(site, 1, 15, 0.0)
    finally:
        site.stop()


@pytest.mark.evidence
def test_upgrade_under_load_and_one_step_back_answer_every_request(
    tmp_path: Path, released: str, empty_postgres_url: str
) -> None:
    (tmp_path / "site").mkdir()
    site = Site(tmp_path / "site", empty_postgres_url, released)
    try:
        site.start()
        assert move_all(site, 2, 120, 1.0)["slowest_answer_seconds"] < ANSWERED_WITHIN_SECONDS
        site.go_back()
        assert move_all(site, 3, 120, 1.0)["slowest_answer_seconds"] < ANSWERED_WITHIN_SECONDS
    finally:
        site.stop()


def test_new_gateway_refuses_what_a_leader_of_the_last_release_lacks(
    tmp_path: Path, released: str, empty_postgres_url: str
) -> None:
    shared: dict[str, Any] = {
        "database_url": empty_postgres_url,
        "engine": "simulated",
        "blob_dir": str(tmp_path / "objects"),
    }
    old = BrokerProcess(tmp_path / "old", env={"PYTHONPATH": released}, **shared)
    with old, GatewayProcess(tmp_path / "gateway", **shared) as gateway:
        broker = gateway.broker
        until(lambda: broker.stats().leader.holder, "the leader of the last release is heard")
        with pytest.raises(
            BrokerError, match=r"arrays needs a leader of gpubroker 0\.3\.0 or later"
        ) as refused:
            broker.submit_array("tests.e2e.work:add", [[1, 2]])
        assert refused.value.code == "leader-outdated"
        assert broker.submit("tests.e2e.work:add", 1, 2, cpu=0.1).id, "what it knows is accepted"
        assert old.terminate() == 0, old.log()
        with BrokerProcess(tmp_path / "new", **shared):
            until(lambda: accepts_arrays(broker), "the new leader is heard")


def accepts_arrays(broker: Broker) -> bool:
    try:
        return bool(broker.submit_array("tests.e2e.work:add", [[1, 2]]).id)
    except BrokerError:  # as before
        return False


def of_the_release(released: str, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(*words), capture_output=True, text=True, env=environment(PYTHONPATH=released), cwd=ROOT
    )


def test_one_step_back_is_taken_while_the_schema_only_grew(
    tmp_path: Path, released: str, empty_postgres_url: str
) -> None:
    migrate(empty_postgres_url, "head")
    kept = ("--data-dir", str(tmp_path / "data"), "--database-url", empty_postgres_url)
    migrate_as_newer_software_does(empty_postgres_url, tmp_path / "grown", *EXPAND)
    assert of_the_release(released, "migrate", *kept).returncode == 0
    with GatewayProcess(
        tmp_path / "gateway", env={"PYTHONPATH": released}, database_url=empty_postgres_url
    ) as back:
        assert back.broker.submit(["true"], cpu=0.1).id
        back.terminate()


def test_step_back_past_a_destructive_migration_is_refused_with_the_reason(
    tmp_path: Path, released: str, url: str
) -> None:
    kept = ("--data-dir", str(tmp_path), "--database-url", url)
    assert of_the_release(released, "migrate", *kept).returncode == 0
    migrate(url, "head")
    migrate_as_newer_software_does(url, tmp_path / "newer", *CONTRACT)
    left = looked_at(url, facts_of)
    for process in ("serve",) if url.startswith("sqlite") else ("gateway", "broker"):
        refused = of_the_release(released, process, *kept)
        assert refused.returncode == 2, refused.stderr
        assert f"its schema is {NEXT:04}, this one knows up to 0" in refused.stderr
        assert "upgrade gpubroker, or restore an older backup" in refused.stderr
    assert looked_at(url, facts_of) == left
