"""Metrics of queued inferences, read at scrape. No model is a label: the names come from clients."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from gpubroker_server.core.domain.task import TERMINAL
from gpubroker_server.core.planning.inferences import waiting
from gpubroker_server.core.world.model_index import WAIT_BOUNDS
from gpubroker_server.core.world.world import World

_WAITING, _RUNNING = "gpubroker_inferences_waiting", "gpubroker_inferences_running"
_FINISHED = "gpubroker_inferences_finished"
WAIT_SECONDS = "gpubroker_inference_wait_seconds"

GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    _WAITING: ("Queued inferences that wait for their model.", ()),
    _RUNNING: ("Queued inferences that were sent to a model.", ()),
}
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    _FINISHED: ("Queued inferences that ended since this process started.", ("state",)),
}


def inference_metrics(world: World) -> Iterator[Metric]:
    answered = world.models.answered
    queued = sum(len(group) for groups in waiting(world).values() for group in groups)
    asked = sum(len(world.models.asking(model)) for model in world.models.asked())
    for name, value in ((_WAITING, queued), (_RUNNING, asked)):
        yield GaugeMetricFamily(name, GAUGES[name][0], value=value)
    about, labels = COUNTERS[_FINISHED]
    finished = CounterMetricFamily(_FINISHED, about, labels=labels)
    for state in sorted(TERMINAL):
        finished.add_metric((state.value,), answered.ended[state])
    yield finished
    buckets = list(zip([*map(str, WAIT_BOUNDS), "+Inf"], answered.waits(), strict=True))
    yield HistogramMetricFamily(
        WAIT_SECONDS,
        "Time until queued inferences were first sent to a model.",
        buckets=buckets,
        sum_value=answered.waited_seconds,
    )
