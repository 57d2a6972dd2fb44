"""Totals on one page, as the API answers them."""

from service.gateway.detection_views import DetectionView
from service.gateway.fragmentation import FragmentationView
from service.gateway.server_views import ModelServerView
from service.gateway.views import AsOf, ExecutorView, ForecastsView, GpuTotals, LeaderView, TaskCounts


class Stats(AsOf):
    forecasts: list[ForecastsView]
    gpu: GpuTotals
    fragmentation: FragmentationView
    tasks: TaskCounts
    executor: ExecutorView
    leader: LeaderView
    detection: DetectionView
    model_servers: list[ModelServerView]
