"""Python SDK of gpubroker.

    from gpubroker import Broker

    with Broker() as broker:
        task = broker.submit("team.training:fit", kwargs={"epochs": 3}, gpu_mb=18 * 1024)
        print(broker.result(task))

Inside a task, `from gpubroker import current_task` gives progress, checkpoints and the notice to stop. Names
are imported when they are first used, so that a task's process does not pay for an HTTP client.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpubroker.async_broker import AsyncBroker
    from gpubroker.broker import Broker
    from gpubroker.cluster.fleet import Gpu, Node, Stats, Tenant
    from gpubroker.cluster.plan import FleetPlan
    from gpubroker.cluster.policy import Policy
    from gpubroker.cluster.quarantine import Detection, Quarantined, Released
    from gpubroker.errors import (
        BrokerError,
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
    from gpubroker.models.decorators import inference
    from gpubroker.models.objects import ObjectUsage, StoredObject
    from gpubroker.models.served import ServedModel
    from gpubroker.runtime import CheckpointTooLarge, NoCurrentTask, RunningTask, Stopped, current_task
    from gpubroker.tasks.batch import Submission
    from gpubroker.tasks.estimates import Estimate
    from gpubroker.tasks.explanation import Explanation, Simulation
    from gpubroker.tasks.task import Event, Outcome, Page, Task, TaskState, Token
    from gpubroker.tasks.task_functions import task

__version__ = "0.1.0"

_HOME = {
    "AsyncBroker": "async_broker",
    "Broker": "broker",
    "Submission": "tasks.batch",
    "inference": "models.decorators",
    "task": "tasks.task_functions",
    **dict.fromkeys(
        (
            "BrokerError",
            "ModelUnavailable",
            "Refused",
            "TaskCancelled",
            "TaskExpired",
            "TaskFailed",
            "Unreachable",
            "WaitTimeout",
            "WrongArgument",
        ),
        "errors",
    ),
    "Estimate": "tasks.estimates",
    **dict.fromkeys(("Gpu", "Node", "Stats", "Tenant"), "cluster.fleet"),
    **dict.fromkeys(("Lease", "LeaseEnded", "LeaseState", "Notice"), "leases.lease"),
    **dict.fromkeys(("Explanation", "Simulation"), "tasks.explanation"),
    **dict.fromkeys(("Event", "Outcome", "Page", "Task", "TaskState", "Token"), "tasks.task"),
    "FleetPlan": "cluster.plan",
    **dict.fromkeys(("ObjectUsage", "StoredObject"), "models.objects"),
    "Policy": "cluster.policy",
    **dict.fromkeys(("Detection", "Quarantined", "Released"), "cluster.quarantine"),
    "ServedModel": "models.served",
    **dict.fromkeys(
        ("CheckpointTooLarge", "NoCurrentTask", "RunningTask", "Stopped", "current_task"), "runtime"
    ),
}

__all__ = [
    "AsyncBroker",
    "Broker",
    "BrokerError",
    "CheckpointTooLarge",
    "Detection",
    "Estimate",
    "Event",
    "Explanation",
    "FleetPlan",
    "Gpu",
    "Lease",
    "LeaseEnded",
    "LeaseState",
    "ModelUnavailable",
    "NoCurrentTask",
    "Node",
    "Notice",
    "ObjectUsage",
    "Outcome",
    "Page",
    "Policy",
    "Quarantined",
    "Refused",
    "Released",
    "RunningTask",
    "ServedModel",
    "Simulation",
    "Stats",
    "Stopped",
    "StoredObject",
    "Submission",
    "Task",
    "TaskCancelled",
    "TaskExpired",
    "TaskFailed",
    "TaskState",
    "Tenant",
    "Token",
    "Unreachable",
    "WaitTimeout",
    "WrongArgument",
    "current_task",
    "inference",
    "task",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gpubroker' has no attribute {name!r}")
    return getattr(import_module(f"gpubroker.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
