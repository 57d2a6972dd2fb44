"""Totals on one page, as the API answers them."""

from gpubroker_server.gateway.cluster.detection_views import DetectionView
from gpubroker_server.gateway.cluster.fragmentation import FragmentationView
from gpubroker_server.gateway.cluster.model_servers import ModelServerView
from gpubroker_server.gateway.status.views import (
    AsOf,
    ExecutorView,
    ForecastsView,
    GpuTotals,
    LeaderView,
    TaskCounts,
)


class Stats(AsOf):
    forecasts: list[ForecastsView]
    gpu: GpuTotals
    fragmentation: FragmentationView
    tasks: TaskCounts
    executor: ExecutorView
    leader: LeaderView
    detection: DetectionView
    model_servers: list[ModelServerView]
