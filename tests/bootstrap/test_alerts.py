"""The documented alerts about two gateways and two brokers, as leaders, database and a gateway are lost."""

from collections.abc import Iterator

import pytest
from gpubroker_server.adapters.sql.store import migrate

from tests.alerts import Prometheus
from tests.chaos.deployment import GatewaysAndBrokers
from tests.e2e.service_process import until
from tests.postgres import OwnServer, a_server_of_its_own

NO_LEADER, OLD_WORLD = "gpubroker_leader_known", "gpubroker_world_age_seconds"


@pytest.fixture(scope="module")
def server() -> Iterator[OwnServer]:
    with a_server_of_its_own() as server:
        migrate(server.url, "head")
        yield server


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, server: OwnServer) -> Iterator[GatewaysAndBrokers]:
    site = GatewaysAndBrokers(tmp_path_factory.mktemp("site"), server.url)
    try:
        site.start()
        yield site
    finally:
        site.stop()


def test_alerts_fire_for_what_is_lost_and_end_when_it_is_back(
    site: GatewaysAndBrokers, server: OwnServer
) -> None:
    prometheus = Prometheus(*site.gateways)
    until(lambda: site.broker_which(leads=True) is not None, "one of the brokers leads")
    prometheus.until()
    leader, standby = (site.broker_which(leads=leads) for leads in (True, False))
    assert leader is not None
    assert standby is not None

    leader.kill_9()
    until(lambda: site.broker_which(leads=True) is standby, "the other one leads")
    prometheus.until()
    assert prometheus.fired == set(), "a takeover is no reason to wake anybody"
    standby.kill_9()
    prometheus.until(NO_LEADER)
    leader.start()
    standby.start()
    prometheus.until()

    server.stop()
    prometheus.until(NO_LEADER, OLD_WORLD)
    server.start()
    prometheus.until()
    for gateway in site.gateways:
        log = gateway.log()
        assert log.count("the database cannot be reached") == log.count("the database answers again") == 1

    site.gateways[1].kill_9()
    prometheus.until("up")
    site.gateways[1].start()
    prometheus.until()
