"""Decide whether a task can become a Ray cluster of its own."""

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from gpubroker_server.core.admission.defaults import NamedDefaults
from gpubroker_server.core.admission.demands import ProfileDefaults
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.submission import RunSpec

PRIVATE: Final = "private"
LEAST_MEMORY_MB: Final = 1024
"""The least host memory of a node of Ray: its own processes take half of it."""


def with_ray_defaults(usual: NamedDefaults) -> NamedDefaults:
    """Return the defaults of a task with a Ray cluster. It gets a CPU even with GPUs, because work in Ray
    needs one unless it says otherwise."""
    return replace(usual, cpu=1.0) if usual.cpu is None else usual


def ray_defaults(of_profile: ProfileDefaults) -> ProfileDefaults:
    """Return the function that does the same for the profile of a rank."""
    return lambda profile: with_ray_defaults(of_profile(profile))


def ray_fault(spec: RunSpec, demand: Demand, *, shared_allowed: bool) -> Refusal | None:
    """Return the reason why the task cannot have the Ray cluster that it asks for; None if it can.
    `shared_allowed` is the operator's permission to use the service's own."""
    if spec.items is not None or spec.seat is not None:
        detail = "is for tasks: workers of arrays and of worker sets share nothing; leave ray out"
        return Refusal("contradiction", detail, "/ray")
    if spec.kind not in ("command", ""):
        detail = (
            "is for commands: a function runs in a process of the service's Ray, which cannot hold a second "
            "one; submit a command, such as python -m your_module"
        )
        return Refusal("contradiction", detail, "/ray")
    if spec.ray != PRIVATE:
        detail = (
            "the operator does not let tasks use the service's own Ray; private makes a cluster of its own"
        )
        return None if shared_allowed else Refusal("ray-not-shared", detail, "/ray")
    ranks = [(f"/resources/bundles/{index}", rank) for index, rank in enumerate(demand.bundles)]
    return _rank_fault(ranks or [("/resources", demand)])


def _rank_fault(ranks: Sequence[tuple[str, Demand]]) -> Refusal | None:
    for at, rank in ranks:
        if rank.cpu != int(rank.cpu):
            detail = (
                f"is {rank.cpu:g}, and Ray counts whole CPUs: ask for {int(rank.cpu)} or {int(rank.cpu) + 1}"
            )
            return Refusal("whole-cpus", detail, f"{at}/cpu")
        if 0 < rank.memory_mb < LEAST_MEMORY_MB:
            detail = (
                f"is {rank.memory_mb}, and a node of Ray needs {LEAST_MEMORY_MB} MiB, of which its own "
                "processes take half; ask for more, or leave memory_mb out"
            )
            return Refusal("too-little-memory", detail, f"{at}/memory_mb")
    return None
