"""Metrics for autoscalers that read Prometheus."""

from collections.abc import Iterator, Mapping

from gpubroker_server.core.explain.autoscaling import AutoscalingDemand
from gpubroker_server.telemetry.exposition import Samples

GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "gpubroker_unmet_gpus": ("GPUs that waiting tasks lack.", ("pool",)),
    "gpubroker_needed_gpus": ("GPUs that are held, and those that waiting tasks lack.", ()),
    "gpubroker_spare_gpus": ("GPUs of nodes of which nothing is held or waited for.", ()),
}


def autoscaling_samples(demand: AutoscalingDemand) -> Iterator[tuple[str, Samples]]:
    unmet = dict.fromkeys((group.pool for group in demand.unmet), 0) or {"": 0}
    for group in demand.unmet:
        unmet[group.pool] += group.amounts.gpus
    yield "gpubroker_unmet_gpus", [((pool,), float(gpus)) for pool, gpus in unmet.items()]
    yield "gpubroker_needed_gpus", [((), float(demand.used.gpus + demand.lacking.gpus))]
    yield "gpubroker_spare_gpus", [((), float(sum(node.amounts.gpus for node in demand.spare)))]
