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
    from gpubroker.batch import Submission
    from gpubroker.broker import Broker
    from gpubroker.decorators import inference
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
    from gpubroker.estimates import Estimate
    from gpubroker.explained import Explanation, Simulation
    from gpubroker.fleet import Gpu, Node, Stats, Tenant
    from gpubroker.leases import Lease, LeaseEnded, LeaseState, Notice
    from gpubroker.models import Event, Outcome, Page, Task, TaskState, Token
    from gpubroker.objects import ObjectUsage, StoredObject
    from gpubroker.planned import FleetPlan
    from gpubroker.policy import Policy
    from gpubroker.quarantine import Detection, Quarantined, Released
    from gpubroker.runtime import CheckpointTooLarge, NoCurrentTask, RunningTask, Stopped, current_task
    from gpubroker.served import ServedModel
    from gpubroker.task_functions import task

__version__ = "0.1.0"

_HOME = {
    "AsyncBroker": "async_broker",
    "Broker": "broker",
    "Submission": "batch",
    "inference": "decorators",
    "task": "task_functions",
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
    "Estimate": "estimates",
    **dict.fromkeys(("Gpu", "Node", "Stats", "Tenant"), "fleet"),
    **dict.fromkeys(("Lease", "LeaseEnded", "LeaseState", "Notice"), "leases"),
    **dict.fromkeys(("Explanation", "Simulation"), "explained"),
    **dict.fromkeys(("Event", "Outcome", "Page", "Task", "TaskState", "Token"), "models"),
    "FleetPlan": "planned",
    **dict.fromkeys(("ObjectUsage", "StoredObject"), "objects"),
    "Policy": "policy",
    **dict.fromkeys(("Detection", "Quarantined", "Released"), "quarantine"),
    "ServedModel": "served",
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
