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
    from gpubroker.broker import AsyncBroker, Broker
    from gpubroker.cluster.cluster_api import Gpu
    from gpubroker.decorators import inference, task
    from gpubroker.errors import (
        BrokerError,
        CallFailed,
        ItemFailed,
        ModelUnavailable,
        NotCollected,
        Refused,
        ResultUnreadable,
        TaskCancelled,
        TaskExpired,
        TaskFailed,
        Unreachable,
        WaitTimeout,
        WrongArgument,
    )
    from gpubroker.leases.lease import LeaseEnded
    from gpubroker.models.stored_object import StoredObject
    from gpubroker.runtime import CheckpointTooLarge, NoCurrentTask, RunningTask, Stopped, current_task
    from gpubroker.runtime.objects import ObjectRef
    from gpubroker.tasks.array_api import ArrayItem
    from gpubroker.tasks.explanation import Explanation
    from gpubroker.tasks.submission import Submission
    from gpubroker.tasks.task import Task
    from gpubroker.transport.decoding import Page
    from gpubroker.wire.administration import NewToken, Token
    from gpubroker.wire.arrays import Array, ArrayState
    from gpubroker.wire.events import Event
    from gpubroker.wire.explanations import Simulation
    from gpubroker.wire.fleet import AutoscalingDemand, Finding, IdleTemplate
    from gpubroker.wire.forecasts import Estimate
    from gpubroker.wire.leases import Lease, LeaseState, Notice
    from gpubroker.wire.models import MeasuredModel, ServedModel
    from gpubroker.wire.nodes import Node, NodeDetail, NodeDisk
    from gpubroker.wire.objects import ObjectUsage
    from gpubroker.wire.outputs import Output, Outputs
    from gpubroker.wire.plans import FleetPlan
    from gpubroker.wire.policy import Policy, Profile, Tenant
    from gpubroker.wire.quarantine import Detection, Quarantined, Released
    from gpubroker.wire.queues import Queue
    from gpubroker.wire.stats import Stats
    from gpubroker.wire.streams import DrawnStream, WorkStream
    from gpubroker.wire.targets import Target
    from gpubroker.wire.tasks import Outcome, Stack, TaskState
    from gpubroker.wire.worker_sets import WorkerSet

__version__ = "0.3.0.dev0"

_NAMES = {
    "broker": (
        "AsyncBroker",
        "Broker",
    ),
    "cluster.cluster_api": ("Gpu",),
    "decorators": (
        "inference",
        "task",
    ),
    "errors": (
        "BrokerError",
        "CallFailed",
        "ItemFailed",
        "ModelUnavailable",
        "NotCollected",
        "Refused",
        "ResultUnreadable",
        "TaskCancelled",
        "TaskExpired",
        "TaskFailed",
        "Unreachable",
        "WaitTimeout",
        "WrongArgument",
    ),
    "leases.lease": ("LeaseEnded",),
    "models.stored_object": ("StoredObject",),
    "runtime": (
        "CheckpointTooLarge",
        "NoCurrentTask",
        "RunningTask",
        "Stopped",
        "current_task",
    ),
    "runtime.objects": ("ObjectRef",),
    "tasks.array_api": ("ArrayItem",),
    "tasks.explanation": ("Explanation",),
    "tasks.submission": ("Submission",),
    "tasks.task": ("Task",),
    "transport.decoding": ("Page",),
    "wire.administration": (
        "NewToken",
        "Token",
    ),
    "wire.arrays": (
        "Array",
        "ArrayState",
    ),
    "wire.events": ("Event",),
    "wire.explanations": ("Simulation",),
    "wire.fleet": (
        "AutoscalingDemand",
        "Finding",
        "IdleTemplate",
    ),
    "wire.forecasts": ("Estimate",),
    "wire.leases": (
        "Lease",
        "LeaseState",
        "Notice",
    ),
    "wire.models": (
        "MeasuredModel",
        "ServedModel",
    ),
    "wire.objects": ("ObjectUsage",),
    "wire.nodes": (
        "Node",
        "NodeDetail",
        "NodeDisk",
    ),
    "wire.outputs": (
        "Output",
        "Outputs",
    ),
    "wire.policy": (
        "Policy",
        "Profile",
        "Tenant",
    ),
    "wire.plans": ("FleetPlan",),
    "wire.quarantine": (
        "Detection",
        "Quarantined",
        "Released",
    ),
    "wire.queues": ("Queue",),
    "wire.stats": ("Stats",),
    "wire.streams": (
        "DrawnStream",
        "WorkStream",
    ),
    "wire.targets": ("Target",),
    "wire.tasks": (
        "Outcome",
        "Stack",
        "TaskState",
    ),
    "wire.worker_sets": ("WorkerSet",),
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
    "NewToken",
    "NoCurrentTask",
    "Node",
    "NodeDetail",
    "NodeDisk",
    "NotCollected",
    "Notice",
    "ObjectRef",
    "ObjectUsage",
    "Outcome",
    "Output",
    "Outputs",
    "Page",
    "Policy",
    "Profile",
    "Quarantined",
    "Queue",
    "Refused",
    "Released",
    "ResultUnreadable",
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
