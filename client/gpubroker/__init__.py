"""Python SDK of gpubroker.

    from gpubroker import Broker

    with Broker() as broker:
        task = broker.submit("team.training:fit", kwargs={"epochs": 3}, gpu_mb=18 * 1024)
        print(broker.result(task))

Inside a task, `from gpubroker import current_task` gives progress, checkpoints and the notice to stop. Names
are imported on first use, so that a task's process does not load an HTTP client.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpubroker.admin import Detection, Queue, Released, Token
    from gpubroker.broker import AsyncBroker, Broker
    from gpubroker.cluster.fleet import (
        AutoscalingDemand,
        Finding,
        Gpu,
        IdleTemplate,
        Node,
        NodeDisk,
        Policy,
        Profile,
        Stats,
        Target,
        Tenant,
    )
    from gpubroker.cluster.plan import FleetPlan
    from gpubroker.cluster.stream_api import DrawnStream, WorkStream
    from gpubroker.decorators import inference, task
    from gpubroker.errors import (
        BrokerError,
        CallFailed,
        ItemFailed,
        ModelUnavailable,
        Refused,
        TaskCancelled,
        TaskExpired,
        TaskFailed,
        Unreachable,
        WaitTimeout,
        WrongArgument,
    )
    from gpubroker.leases.lease import Lease, LeaseEnded, LeaseState, Notice
    from gpubroker.models.model import MeasuredModel, ObjectUsage, ServedModel, StoredObject
    from gpubroker.runtime import CheckpointTooLarge, NoCurrentTask, RunningTask, Stopped, current_task
    from gpubroker.runtime.objects import ObjectRef
    from gpubroker.tasks.array_api import Array, ArrayItem, ArrayState
    from gpubroker.tasks.estimates import Estimate
    from gpubroker.tasks.explanation import Explanation, Simulation
    from gpubroker.tasks.submission import Submission
    from gpubroker.tasks.task import Event, Outcome, Quarantined, Stack, Task, TaskState
    from gpubroker.tasks.worker_set_api import WorkerSet
    from gpubroker.transport.decoding import Page

__version__ = "0.3.0.dev0"

_NAMES = {
    "admin": ("Detection", "Queue", "Released", "Token"),
    "broker": ("AsyncBroker", "Broker"),
    "cluster.fleet": (
        "AutoscalingDemand",
        "Finding",
        "Gpu",
        "IdleTemplate",
        "Node",
        "NodeDisk",
        "Policy",
        "Profile",
        "Stats",
        "Target",
        "Tenant",
    ),
    "cluster.plan": ("FleetPlan",),
    "cluster.stream_api": ("DrawnStream", "WorkStream"),
    "decorators": ("inference", "task"),
    "errors": (
        "BrokerError",
        "CallFailed",
        "ItemFailed",
        "ModelUnavailable",
        "Refused",
        "TaskCancelled",
        "TaskExpired",
        "TaskFailed",
        "Unreachable",
        "WaitTimeout",
        "WrongArgument",
    ),
    "leases.lease": ("Lease", "LeaseEnded", "LeaseState", "Notice"),
    "models.model": ("MeasuredModel", "ObjectUsage", "ServedModel", "StoredObject"),
    "runtime": ("CheckpointTooLarge", "NoCurrentTask", "RunningTask", "Stopped", "current_task"),
    "runtime.objects": ("ObjectRef",),
    "tasks.array_api": ("Array", "ArrayItem", "ArrayState"),
    "tasks.estimates": ("Estimate",),
    "tasks.explanation": ("Explanation", "Simulation"),
    "tasks.submission": ("Submission",),
    "tasks.task": ("Event", "Outcome", "Quarantined", "Stack", "Task", "TaskState"),
    "tasks.worker_set_api": ("WorkerSet",),
    "transport.decoding": ("Page",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Array",
    "ArrayItem",
    "ArrayState",
    "AsyncBroker",
    "AutoscalingDemand",
    "Broker",
    "BrokerError",
    "CallFailed",
    "CheckpointTooLarge",
    "Detection",
    "DrawnStream",
    "Estimate",
    "Event",
    "Explanation",
    "Finding",
    "FleetPlan",
    "Gpu",
    "IdleTemplate",
    "ItemFailed",
    "Lease",
    "LeaseEnded",
    "LeaseState",
    "MeasuredModel",
    "ModelUnavailable",
    "NoCurrentTask",
    "Node",
    "NodeDisk",
    "Notice",
    "ObjectRef",
    "ObjectUsage",
    "Outcome",
    "Page",
    "Policy",
    "Profile",
    "Quarantined",
    "Queue",
    "Refused",
    "Released",
    "RunningTask",
    "ServedModel",
    "Simulation",
    "Stack",
    "Stats",
    "Stopped",
    "StoredObject",
    "Submission",
    "Target",
    "Task",
    "TaskCancelled",
    "TaskExpired",
    "TaskFailed",
    "TaskState",
    "Tenant",
    "Token",
    "Unreachable",
    "WaitTimeout",
    "WorkStream",
    "WorkerSet",
    "WrongArgument",
    "current_task",
    "inference",
    "task",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'gpubroker' has no attribute {name!r}")
    return getattr(import_module(f"gpubroker.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
