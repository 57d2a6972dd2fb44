"""What a list prints is taken by every command of that kind, also by an admin of another tenant."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpubroker import Broker, Refused

from tests.chaos.forked import ForkedService
from tests.client.command_line import Run, command_line
from tests.e2e.service_process import ServiceProcess, until

WORK = "tests.e2e.work:hold"
"""The engine has it last for its `seconds`."""
LONG = "a-very-long-name-of-which-a-list-shows-the-beginning"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ForkedService(tmp_path_factory.mktemp("service") / "data", engine="simulated") as running:
        yield running


@pytest.fixture
def admin(
    service: ServiceProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """The command line of an admin of the tenant `default`."""
    monkeypatch.setenv("GPUBROKER_DATA_DIR", str(service.data_dir))
    return command_line(monkeypatch, capsys)


@pytest.fixture(scope="module")
def acme(service: ServiceProcess) -> Iterator[Broker]:
    """A user of another tenant."""
    scopes = ["tasks:read", "tasks:write", "tasks:code", "tasks:command"]
    with service.broker as broker:
        token = broker.create_token("acme-user", tenant="acme", scopes=scopes)
    with Broker(service.url, token.token) as user:
        yield user


def first_words(out: str) -> list[str]:
    """The first word of each line below the heads."""
    return [line.split()[0] for line in out.splitlines()[1:] if line.strip()]


def test_a_task_of_another_tenant_is_found_as_the_list_shows_it(admin: Run, acme: Broker) -> None:
    task = acme.submit(WORK, kwargs={"seconds": 600}, name="theirs", priority=30)
    listed = admin("ps --all-tenants")
    shown = next((word for word in first_words(listed.out) if task.id.endswith(word)), "")
    assert shown, (task.id, listed)
    for word in (shown, "theirs"):
        assert admin("show", word, "-o", "json").json["id"] == task.id
    assert admin("explain", shown, "-o", "json").json["id"] == task.id
    assert admin("priority", shown, "20").code == 0
    assert admin("cancel", shown).code == 0
    until(lambda: acme.get(task).is_finished, "it is cancelled")


def test_ones_own_task_goes_before_that_of_another_tenant(admin: Run, acme: Broker) -> None:
    theirs = acme.submit(WORK, kwargs={"seconds": 600}, name="same")
    mine = admin(f"submit {WORK} --name same -i seconds=600 -o json").json["id"]
    assert admin("show same -o json").json["id"] == mine
    admin("cancel", mine, theirs.id)


def test_a_name_that_a_list_cut_short_is_found(admin: Run) -> None:
    task = admin(f"submit {WORK} --name {LONG} -i seconds=600 -o json").json["id"]
    cut = f"{LONG[:15]}…"  # as on a narrow terminal
    assert admin("show", cut, "-o", "json").json["id"] == task
    assert "no task is named" in admin("show", "zzz-very…").err
    admin("cancel", task)


def test_leases_are_found_as_their_list_shows_them(admin: Run, acme: Broker) -> None:
    mine = admin("lease ask --holder mine --gpu-memory 1GiB -o json").json["id"]
    theirs = acme.ask_lease(holder="notebook", gpu_mb=1024)
    [own] = first_words(admin("lease list").out)
    assert mine.endswith(own)
    assert theirs.id[-8:] in first_words(admin("lease list --all-tenants").out)
    for word in (theirs.id[-8:], "notebook"):
        assert admin("lease show", word, "-o", "json").json["id"] == theirs.id
    assert admin("lease release", theirs.id[-8:]).code == 0
    assert admin("lease release", own).code == 0
    with pytest.raises(Refused, match="other tenants' leases"):
        list(acme.leases(tenant="*"))


def test_worker_sets_are_found_by_name_by_part_of_an_id_and_by_a_worker(admin: Run, acme: Broker) -> None:
    workers = acme.create_worker_set(WORK, kwargs={"seconds": 600}, name="solvers", count=2, cpu=0.1)
    until(lambda: "solvers" in admin("workers list").out, "the leader has formed it")
    [shown] = first_words(admin("workers list").out)
    assert workers.id.endswith(shown)
    second = workers.workers[1].id
    for word in (shown, "solvers", second, second[-8:]):
        assert admin("workers show", word).out.startswith(workers.id)
    assert admin("workers scale solvers 1").code == 0
    assert "no worker set is named 'none-such'" in admin("workers show none-such").err
    assert admin("show solvers -o json").json["id"] == workers.id, "its name means all of it"
    assert admin("workers end", shown).code == 0


def test_arrays_are_found_by_name_and_by_a_worker(admin: Run, acme: Broker) -> None:
    array = acme.submit_array(WORK, [1, 2, 3], name="sweep", max_parallel=2, cpu=0.1)
    second = array.workers[1].id
    shown = [word for word in first_words(admin("ps --all-tenants").out) if second.endswith(word)]
    for word in (*shown, second, "sweep", array.id[-8:]):
        assert admin("array", word, "-o", "json").json["id"] == array.id
    assert json.loads(admin("show sweep -o json").out)["id"] == array.id
    assert admin("array sweep --cancel").code == 0


def test_nodes_are_found_though_their_name_was_cut_short(admin: Run) -> None:
    [node] = admin("nodes -o json").json
    assert admin("cordon", f"{node['name'][:3]}…", "-o", "json").json["cordoned"] is True
    assert admin("uncordon", node["name"]).code == 0
    assert "no node begins as" in admin("cordon", "zzz…").err


def test_memory_that_a_stranger_may_not_see_is_not_found(
    service: ServiceProcess, admin: Run, acme: Broker, tmp_path: Path
) -> None:
    mine = admin(f"submit {WORK} --name private -i seconds=600 -o json").json["id"]
    with pytest.raises(Refused):
        acme.get(mine)
    token = acme.connection.token
    assert "no task is named 'private'" in admin("--token", str(token), "show", "private").err
    admin("cancel", mine)
