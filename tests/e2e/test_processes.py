"""Two gateways and two brokers on one PostgreSQL and a real Ray, as users meet them."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gpubroker import Broker, Refused, Task
from gpubroker_server.adapters.sql.store import migrate
from gpubroker_server.core.domain.leader_term import LeaderTermRules

from tests.chaos.shutdown import Batch, GatewaysAndBrokersOnRay, stop_under_load
from tests.e2e.guarded_disk import GuardedDisk, audited, guarded_disk
from tests.e2e.hands import Hands
from tests.e2e.service_process import ServiceProcess, until
from tests.patience import PATIENCE_SECONDS
from tests.postgres import OwnServer, a_server_of_its_own

STALE_SECONDS = 1.5
NAMED = {"KEY": "secret:KEY"}


@pytest.fixture(scope="module")
def server() -> Iterator[OwnServer]:
    with a_server_of_its_own() as server:
        migrate(server.url, "head")
        yield server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedDisk]:
    """Its roots are on the node."""
    with guarded_disk(tmp_path_factory.mktemp("guarded")) as disk:
        yield disk


@pytest.fixture(scope="module")
def site(
    tmp_path_factory: pytest.TempPathFactory, server: OwnServer, guarded: GuardedDisk
) -> Iterator[GatewaysAndBrokersOnRay]:
    limits = {"stale_seconds": STALE_SECONDS}
    folder = tmp_path_factory.mktemp("site")
    site = GatewaysAndBrokersOnRay(folder, server.url, limits=limits, fleet=guarded.settings)
    try:
        site.start()
        yield site
    finally:
        site.stop()


def answer(gateway: ServiceProcess, path: str) -> tuple[int, str]:
    """Status and code, asked once, where the SDK would ask again."""
    known = json.loads((gateway.data_dir / "client.json").read_text(encoding="utf-8"))
    headers = {"Authorization": f"Bearer {known['token']}"}
    found = httpx.get(f"{gateway.url}{path}", headers=headers, timeout=PATIENCE_SECONDS)
    return found.status_code, found.json().get("code", "")


def test_any_gateway_answers_for_all_and_says_when_it_cannot(
    tmp_path: Path, site: GatewaysAndBrokersOnRay, server: OwnServer
) -> None:
    a, b = site.gateways
    large = a.broker.submit("tests.e2e.work:add", "x" * 100_000, "y")
    assert b.broker.result(large) == "x" * 100_000 + "y"
    a.broker.set_secret("KEY", "of the tenant")
    digests = b.broker.result(b.broker.submit("tests.e2e.work:digest_of_variable", "KEY", env=NAMED))
    assert set(digests.values()) == {hashlib.sha256(b"of the tenant").hexdigest()}
    held = Hands(a.broker, tmp_path).at_work("held", gpus=2)
    b.broker.cancel(held, grace_seconds=0)
    assert a.broker.wait(held).state == "cancelled"

    spoken = a.broker.submit("tests.e2e.work:hold_and_say", str(tmp_path / "gate"), gpu_mb=1024)
    followed = [gateway.broker.logs(spoken, follow=True, stream="stdout") for gateway in (a, b)]
    assert [next(lines) for lines in followed] == ["before\n", "before\n"]
    (tmp_path / "gate").touch()
    assert [list(lines) for lines in followed] == [["after\n"], ["after\n"]]

    workers = a.broker.create_worker_set("tests.e2e.work:Counter", cpu=0.1)
    with pytest.raises(Refused, match="this gateway has no Ray driver"):
        b.broker.workers(workers).add(1)
    b.broker.end_worker_set(workers)

    server.stop()
    until(lambda: answer(b, "/gpus") == (503, "follower-stale"), "the other gateway is too old")
    assert answer(b, f"/tasks/{large.id}") == (503, "store-unavailable")
    server.start()
    until(lambda: answer(b, "/gpus")[0] == 200, "it knows the cluster again")
    after = b.broker.submit("tests.e2e.work:add", 3, 4)
    assert a.broker.result(after) == 7


def test_a_full_node_is_closed_cleaned_and_open_again(
    site: GatewaysAndBrokersOnRay, server: OwnServer, guarded: GuardedDisk
) -> None:
    guarded.is_cleaned(site.gateways[1].broker, audited(server.url))


def test_weight_set_at_one_gateway_orders_the_queue_of_the_leader(
    tmp_path: Path, site: GatewaysAndBrokersOnRay
) -> None:
    a, b = (gateway.broker for gateway in site.gateways)
    for stream in ("ladder", "nightly"):
        assert a.put_stream(stream, 1.0).weight == 1.0
    until(lambda: [it.name for it in b.streams()] == ["ladder", "nightly"], "the other gateway knows both")
    hands = Hands(a, tmp_path)
    held = hands.at_work("held", gpus=2)
    first, second = (hands.hold(stream, gpus=2, stream=stream) for stream in ("nightly", "ladder"))
    until(lambda: [position(b, it) for it in (first, second)] == [1, 2], "they stand as they came")

    b.signal_stream("nightly", quality=0.5)
    assert a.put_stream("ladder", 4.0, reason="harder now").weight == 4.0
    until(lambda: {it.name: it.weight for it in b.streams()} == {"ladder": 4.0, "nightly": 0.55}, "weights")
    assert a.next_stream(seed=7).stream == b.next_stream(seed=7).stream
    until(lambda: [position(b, it) for it in (first, second)] == [2, 1], "the leader has weighed them")
    hands.let_go(held)
    until(lambda: a.get(second).state == "running", "the heavier one starts")
    assert b.get(first).state == "pending"
    for task in (first, second):
        a.cancel(task, grace_seconds=0)
    assert {b.wait(task).state for task in (first, second)} == {"cancelled"}
    for stream in ("ladder", "nightly"):
        b.delete_stream(stream)


def position(broker: Broker, task: Task) -> int | None:
    pending = broker.get(task).pending
    return None if pending is None else pending.position


def test_processes_ending_under_load_lose_and_repeat_nothing(
    site: GatewaysAndBrokersOnRay,
) -> None:
    """Others go on at once in their place."""
    found = stop_under_load(site, Batch(seed=1, stops=2, tasks_per_stop=25, targets=("gateway", "leader")))
    assert found["stops"] == {"gateway": 1, "leader": 1}
    assert found["wrong"] == []
    assert (found["lost"], found["accepted_twice"], found["restarted_runs"]) == (0, 0, 0)
    [seconds] = found["seconds"]["without_a_leader"]
    print(f"nobody led for {seconds:.2f} s")
    assert seconds < LeaderTermRules().ttl_seconds / 2, "no broker waits for the lease to end"
