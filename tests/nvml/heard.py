"""What a leader makes of the reports of an agent."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from gpubroker.runtime.messages import Report
from gpubroker_server.adapters.ray.driver.reports import ReportReader
from gpubroker_server.adapters.ray.wire import write_reports
from gpubroker_server.core.domain.device import DeviceSample, NodeSample
from gpubroker_server.core.domain.orders import Gone, NodeReport, Sampled

from tests.builders import NOW
from tests.contracts.fake_runners import Leader


def core_report(report: Report) -> Any:
    """As the leader reads it, on its clock, which is at NOW when the report arrives."""
    [read] = (
        ReportReader("test", lambda: NOW)
        .read(write_reports("n1", report_time(report), [report]), 0.0)
        .reports
    )
    return read


def report_time(report: Report) -> float:
    return float(report[1] if report[0] in ("sampled", "node_sampled", "node_seen") else report[4])


async def inventory(leader: Leader, true: Callable[[NodeReport], bool] = lambda _: True) -> NodeReport:
    """The newest that the agent announced, as soon as this holds for it."""
    seen = core_report(await leader.until_announced(lambda report: true(core_report(report))))
    assert isinstance(seen, NodeReport)
    return seen


def of_uuid(read: Sampled | Gone) -> Mapping[str, DeviceSample]:
    return {sample.device.rpartition("/")[2]: sample for sample in read.samples}


async def sampled(leader: Leader, *uuids: str) -> Mapping[str, DeviceSample]:
    """The next samples that are of these devices and no others. A busy machine may miss one in between."""
    while list(found := await next_samples(leader)) != list(uuids):
        pass
    return found


async def next_samples(leader: Leader) -> Mapping[str, DeviceSample]:
    """Measured after this call."""
    called_at = time.time()
    while (report := await leader.receive("sampled"))[1] < called_at:
        leader.received.remove(report)
    return of_uuid(core_report(report))


async def next_node_sample(leader: Leader) -> NodeSample:
    """Measured after this call."""
    called_at = time.time()
    while (report := await leader.receive("node_sampled"))[1] < called_at:
        leader.received.remove(report)
    read = core_report(report)
    assert isinstance(read, NodeSample)
    return read
