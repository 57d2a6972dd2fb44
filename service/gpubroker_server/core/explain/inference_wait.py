"""Why an inference is not being answered, in words for people, and when it will be sent."""

from collections.abc import Sequence

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.planning.backfill import Forecast
from gpubroker_server.core.planning.expected_start import Start, there_at
from gpubroker_server.core.planning.inference_admission import holders, servers_of, waiting
from gpubroker_server.core.world.world import World

_DOES = {
    TaskState.PENDING: "it waits for its room",
    TaskState.ADMITTED: "it is being loaded",
    TaskState.STOPPING: "it is being unloaded",
}

_IS_NOWHERE = (
    "it was not brought, or has left, and is asked for again, each time later; `gpubroker models` says how "
    "its last load ended"
)


def why_not_sent(world: World, task: Task, policy: Policy) -> list[tuple[Reason, str]]:
    """Nothing if its model is there and takes one more."""
    model, serving = task.demand.answered_by, policy.serving
    if not serving.is_anywhere:
        return [(Reason.BACKEND_UNAVAILABLE, "there is no server of models (any more); set triton.servers")]
    servers = servers_of(world, policy, model)
    if not servers:
        held = holders(world, policy, model)
        does = _DOES[held[0].state] if held else _IS_NOWHERE
        return [(Reason.MODEL_LOADING, f"model {model} is not in memory: {does}")]
    if len(world.homes.asking(model)) >= serving.at_once:
        message = f"{serving.at_once} inferences of model {model} are being answered, and no more at once"
        return [(Reason.CONCURRENCY_LIMITED, message)]
    return []


def sent_at(
    world: World, task: Task, policy: Policy, forecasts: Sequence[Forecast], now: Instant
) -> Start | None:
    """When one that waits for nothing but its model is likely to be sent: when that is in memory. None if
    nobody can tell: of a model that was never loaded, and of one for which others must have been answered
    first, since how long answers take is not known."""
    model = task.demand.answered_by
    if task.id not in world.queue or servers_of(world, policy, model):
        return None
    if sum(map(len, waiting(world)[model])) > policy.serving.at_once:
        return None
    timed = [one for one in holders(world, policy, model) if one.model is not None and one.model.load_seconds]
    starts = (there_at(world, one, forecasts, now) for one in timed)
    return min((start for start in starts if start is not None), default=None)
