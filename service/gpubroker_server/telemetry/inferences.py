"""Metrics of queued inferences, read at scrape. No model is a label: the names come from clients."""

from collections.abc import Iterator, Mapping

from gpubroker_server.core.domain.task import TERMINAL
from gpubroker_server.core.planning.inferences import waiting
from gpubroker_server.core.world.model_index import WAIT_BOUNDS
from gpubroker_server.core.world.world import World
from gpubroker_server.telemetry.exposition import Buckets, Metric, histogram
from gpubroker_server.telemetry.nodes import Read

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


def inference_samples(world: World) -> Iterator[Read]:
    queued = sum(len(group) for groups in waiting(world).values() for group in groups)
    yield _WAITING, [((), queued)]
    yield _RUNNING, [((), sum(len(world.models.asking(model)) for model in world.models.asked()))]
    ended = world.models.answered.ended
    yield _FINISHED, [((state.value,), ended[state]) for state in sorted(TERMINAL)]


def wait_metric(world: World) -> Metric:
    answered = world.models.answered
    found = Buckets((), answered.waits(), answered.waited_seconds)
    about = "Time until queued inferences were first sent to a model."
    return histogram(WAIT_SECONDS, about, (), WAIT_BOUNDS, [found])
