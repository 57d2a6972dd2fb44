"""Metrics of queued inferences, which are read at a scrape. No model is a label, because names of models
come from clients."""

from typing import Final

from gpubroker_server.core.domain.task import TERMINAL
from gpubroker_server.core.planning.inferences import waiting
from gpubroker_server.core.world.model_index import WAIT_BOUNDS
from gpubroker_server.core.world.world import World
from gpubroker_server.telemetry.exposition import Buckets, Metric, Samples, histogram
from gpubroker_server.telemetry.table import MetricRow, Scrape, a_counter

WAIT_SECONDS = "gpubroker_inference_wait_seconds"


def _waiting(scrape: Scrape) -> Samples:
    return [((), sum(len(group) for groups in waiting(scrape.world).values() for group in groups))]


def _running(scrape: Scrape) -> Samples:
    models = scrape.world.models
    return [((), sum(len(models.asking(model)) for model in models.asked()))]


def _finished(scrape: Scrape) -> Samples:
    ended = scrape.world.models.answered.ended
    return [((state.value,), ended[state]) for state in sorted(TERMINAL)]


METRICS: Final = (
    MetricRow("gpubroker_inferences_waiting", "Queued inferences that wait for their model.", (), _waiting),
    MetricRow("gpubroker_inferences_running", "Queued inferences that were sent to a model.", (), _running),
    a_counter(
        "gpubroker_inferences_finished",
        "Queued inferences that ended since this process started.",
        ("state",),
        _finished,
    ),
)


def wait_metric(world: World) -> Metric:
    answered = world.models.answered
    buckets = Buckets((), answered.waits(), answered.waited_seconds)
    about = "Time until queued inferences were first sent to a model."
    return histogram(WAIT_SECONDS, about, (), WAIT_BOUNDS, [buckets])
