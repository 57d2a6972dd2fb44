"""From settings to those who send queued inferences to servers of models."""

from collections.abc import Sequence

from service.adapters.triton.asker import TritonAsker
from service.bootstrap.models import server_of
from service.broker.inference_desk import BatchRules, InferenceDesk
from service.core.units import Seconds
from service.inference_ports import ModelAsker
from service.ports import Clock
from service.settings import Settings


def askers_of(settings: Settings) -> list[ModelAsker]:
    """Each with connections of its own, opened when they are needed. Raises StartRefused."""
    most_bytes = settings.limits.result_bytes
    return [TritonAsker(server_of(given), most_bytes) for given in settings.triton.servers]


def inference_desk_of(settings: Settings, askers: Sequence[ModelAsker], clock: Clock) -> InferenceDesk:
    rules = {
        model: BatchRules(given.max_size, Seconds(given.delay_seconds))
        for model, given in settings.triton.batch.items()
    }
    return InferenceDesk(askers, clock, rules=rules)
