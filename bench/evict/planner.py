"""The service's own choice of the model to evict: what `plan_cycle` decides for one more model."""

from collections.abc import Collection, Mapping

from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.device import Device, DeviceSample, Node
from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.lease import HolderKind, Lease, LeaseState
from gpubroker_server.core.domain.models import ModelUsage
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task, TaskState, model_of
from gpubroker_server.core.domain.units import Fence, Instant, Mib, NodeName, Seconds, TaskId, device_key
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.world.world import World

from bench.evict.trace import Use

MODEL_MB = Mib(1024)
IDLE, ASKED = -1, 50
"""The priority of a model that no request wants any more, and that of the model that is requested."""
LONG_AGO = Instant(0.0)
"""A load time so early that every model is past its minimum residency, since a request of the replay cannot
wait."""

NODE = Node(NodeName("replay"), 64.0, Mib(65_536), 64, incarnation="1", boot_id="1")
DEVICE = device_key("bench", NODE.name, "gpu0")


class Planner:
    """One server whose models are all idle, each of the same size, on a device that they fill."""

    def __init__(self, load_seconds: Mapping[str, float]) -> None:
        self._load_seconds = load_seconds
        self._usage: dict[str, ModelUsage] = {}

    def loaded(self, _model: str, _number: int) -> None:
        pass

    def used(self, use: Use, _number: int) -> None:
        self._usage[use.model] = self._usage.get(use.model, ModelUsage()).used(Instant(use.at))

    def victim(self, resident: Collection[str], now: float) -> str:
        [decision] = plan_cycle(self._world(resident, Instant(now)), Policy(), Instant(now)).decisions
        return victim_of(decision)

    def _world(self, resident: Collection[str], now: Instant) -> World:
        world = World()
        world.as_of = now
        world.add_node(NODE)
        world.add_device(Device(DEVICE, NODE.name, "gpu0", "gpu", 0, Mib(len(resident) * MODEL_MB)))
        world.measure([DeviceSample(DEVICE, now, Mib(0))])
        for model in resident:
            task = self._idle(model)
            world.add_task(task)
            world.add_lease(lease_of(task))
        demand = Demand(gpus=1, gpu_mb=MODEL_MB)
        world.add_task(Task(TaskId("asked"), "bench", "asked", ASKED, demand, now, holder=terms_of("asked")))
        return world

    def _idle(self, model: str) -> Task:
        return Task(
            TaskId(f"model_{model}"),
            "bench",
            model,
            IDLE,
            Demand(gpus=1, gpu_mb=MODEL_MB),
            LONG_AGO,
            holder=terms_of(model, self._load_seconds[model], self._usage[model]),
            state=TaskState.RUNNING,
            fence=Fence(1),
            node=NODE.name,
            admitted_at=LONG_AGO,
            started_at=LONG_AGO,
        )


def terms_of(model: str, load_seconds: float = 0.0, usage: ModelUsage | None = None) -> Model:
    return Model("server", model, load_seconds=Seconds(load_seconds), usage=usage or ModelUsage())


def lease_of(task: Task) -> Lease:
    holder = HolderKind.MODEL, task.id, task.fence
    return Lease(*holder, DEVICE, MODEL_MB, task.tenant, task.priority, LONG_AGO, LeaseState.HELD)


def victim_of(decision: Decision) -> str:
    """Return the model that a decision evicts. Raises ValueError unless exactly one model is evicted."""
    [write] = decision.tasks
    return model_of(write.task).model
