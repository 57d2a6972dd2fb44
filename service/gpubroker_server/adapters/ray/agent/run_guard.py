"""Keeps user code in a worker process of Ray from using Ray, because runs are no part of the service's own
cluster."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import ray

_is_ours: ContextVar[bool] = ContextVar("gpubroker_uses_ray", default=False)

REFUSAL = (
    "this function runs in a process of the service's own Ray, which is not for runs, and a process cannot "
    "hold a second one; submit a command (python -m your_module): there ray.init() starts a Ray of its own"
)


class NoRayForRuns(RuntimeError):
    """The user code of a run has called Ray."""


def without_own_address(env: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables without the address of the Ray that this process belongs to. An agent of an
    earlier release includes it."""
    if env.get("RAY_ADDRESS") != _own_address():
        return env
    return {name: text for name, text in env.items() if name != "RAY_ADDRESS"}


def _own_address() -> str | None:
    return str(ray.get_runtime_context().gcs_address) if ray.is_initialized() else None


def keep_runs_out() -> None:
    """Make each use of Ray by user code of this process fail at once with REFUSAL. Does nothing in a process
    that is not connected to Ray.

    Ray's own functions, and `remote()` of functions and classes of user code, call `ray.init` if
    `ray.is_initialized` returns False. So these two are replaced, and the functions that ask the cluster
    without calling them.
    """
    if not ray.is_initialized():
        return
    for name in ("init", "client", "nodes", "cluster_resources", "available_resources", "timeline"):
        setattr(ray, name, _refuse)
    setattr(ray, "is_initialized", _is_ours.get)  # noqa: B010  # of a module
    setattr(ray, "shutdown", _do_nothing)  # noqa: B010


@contextmanager
def ray_of_the_service() -> Iterator[None]:
    """Allow this context, and no other thread, to use Ray."""
    token = _is_ours.set(True)
    try:
        yield
    finally:
        _is_ours.reset(token)


def _refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise NoRayForRuns(REFUSAL)


def _do_nothing(*_args: Any, **_kwargs: Any) -> None:
    """Keep the connection of this process to Ray, because the run would be lost without it."""
