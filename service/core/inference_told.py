"""Why an inference is not being answered, in words for people."""

from service.core.inferences import holders, servers_of
from service.core.policy import Policy
from service.core.reasons import Reason
from service.core.task import Task, TaskState
from service.core.world import World

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
