"""From settings to those who send queued inferences to servers of models."""

from collections.abc import Sequence

from gpubroker_server.adapters.triton.inference_client import TritonInferenceClient
from gpubroker_server.bootstrap.model_servers import server_of
from gpubroker_server.broker.inference_dispatch import BatchRules, InferenceDesk
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.ports.inferences import InferenceClient
from gpubroker_server.ports.store import Clock
from gpubroker_server.settings.loading import Settings


def inference_clients_of(settings: Settings) -> list[InferenceClient]:
    """Each with connections of its own, opened when they are needed. Raises StartRefused."""
    most_bytes = settings.limits.result_bytes
    return [TritonInferenceClient(server_of(given), most_bytes) for given in settings.triton.servers]


def inference_desk_of(settings: Settings, clients: Sequence[InferenceClient], clock: Clock) -> InferenceDesk:
    rules = {
        model: BatchRules(given.max_size, Seconds(given.delay_seconds))
        for model, given in settings.triton.batch.items()
    }
    return InferenceDesk(clients, clock, rules=rules)
