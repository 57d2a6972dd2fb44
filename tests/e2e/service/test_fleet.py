"""What the leader finds of a real node, and what it counts of real work, is in the metrics."""

from gpubroker import Broker
from prometheus_client.parser import text_string_to_metric_families

from tests.alerts import metrics_of
from tests.e2e.service_process import ServiceProcess, until


def metrics(service: ServiceProcess, label: str) -> dict[str, float]:
    """Those with this label and at most that of a node, by its value."""
    families = text_string_to_metric_families(metrics_of(service) or "")
    samples = (sample for family in families for sample in family.samples)
    return {it.labels[label]: it.value for it in samples if it.labels.keys() - {"hostname"} == {label}}


def test_a_busy_node_and_the_calls_of_a_worker_are_counted(service: ServiceProcess, broker: Broker) -> None:
    before = metrics(service, "component")
    made = broker.create_worker_set("tests.e2e.work:Counter", count=1, cpu=0.1)
    worker = broker.workers(made, pickled=False)
    assert [worker.add(2), worker.add(3)] == [2, 5]
    until(lambda: metrics(service, "component")["worker_calls"] - before["worker_calls"] == 2, "two calls")
    broker.end_worker_set(made)
    until(lambda: metrics(service, "component")["finished"] > before["finished"], "the worker has ended")
    assert metrics(service, "kind")["fleet.NODE_OVERLOADED"] == 1
    assert metrics(service, "measure")["host_memory"] == 1
