"""Operations on worker sets: stateful workers whose methods are called."""

import base64
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import cloudpickle

from gpubroker.errors import ResultUnreadable, WrongArgument
from gpubroker.runtime.carrying import call_parts, faulty_part, is_not_json, is_not_pickled
from gpubroker.tasks.large_arguments import fitting_body, small_arguments
from gpubroker.tasks.naming import set_meant
from gpubroker.tasks.submission import (
    MAX_BODY_BYTES,
    SubmitOptions,
    Target,
    as_json,
    parted_options,
    with_ids_after,
)
from gpubroker.transport.decoding import decode
from gpubroker.transport.exchange import Call, Steps
from gpubroker.transport.operations import Operations, Pages, listing, operation, path_part
from gpubroker.wire.worker_sets import WorkerSet


class WorkerSetOptions(SubmitOptions, total=False):
    """The keyword arguments of `create_worker_set`. All may be left out. The resources are those of one
    worker."""

    count: int
    """The number of workers that are wanted. Default: 1."""
    min_count: int
    """The least number of workers. Default: `count`."""
    max_count: int
    """The most workers that the set may have. A task is created for each of them. Default: `count`."""
    scale: Mapping[str, Any]
    """The signal that the number of workers follows: `{"by": "calls", "target": 8}`; `by` is calls, cpu or
    signal."""
    health: Mapping[str, Any]
    """The check of a worker's health: `{"method": "check_health", "period_seconds": 10}`. An unhealthy worker
    is restarted."""
    start_timeout_seconds: float
    """The longest time in which a worker may make its objects; after it, the worker has failed to start.
    Default: 3600."""
    max_restarts: int
    """The largest number of restarts of one worker after failures. Default: no limit."""
    colocate_with: Mapping[str, Any]
    """Further roles in the same process: `{"judge": {"run": {"entrypoint": "team.roles:Judge"}, "gpu_mb":
    4096}}`. A worker gets the maximum of what the roles need."""


AnyWorkerSet = WorkerSet | str
"""A worker set, its id or that of one of its workers, 8 or more characters from the end of it, or a unique
name."""


class WorkerSetApi(Operations):
    @operation
    def create_worker_set(
        self, target: Target, *args: Any, **options: Unpack[WorkerSetOptions]
    ) -> Steps[WorkerSet]:
        """Keep workers running that each make one object: `target(*args)`, of a class, or `module:Class`.

            workers = broker.create_worker_set(Solver, "large", count=2, gpu_mb=20_000, max_concurrency=8)
            broker.call_worker(workers, "solve", problem)

        When this returns, the set is on the service's disk. The other options are those of `submit`, for each
        worker. Raises Refused.
        """
        of_task, given = parted_options(options, WorkerSetOptions)
        of_task = yield from with_ids_after(self._ask, target, of_task)
        body = yield from fitting_body(self._send, target, args, of_task)
        if given:
            body = body[:-1] + b"," + json.dumps(given).encode()[1:]
        made = yield from self._make("/worker-sets", options.get("idempotency_key"), body)
        return decode(WorkerSet, made)

    @operation
    def worker_set(self, workers: AnyWorkerSet) -> Steps[WorkerSet]:
        """Return the set as it is now."""
        return decode(WorkerSet, (yield from self._ask("GET", (yield from self._set_path(workers)))))

    @listing
    def worker_sets(self, *, sort: str | None = None) -> Pages[WorkerSet]:
        """Yield the worker sets that have not ended, oldest first, fetched page by page as they are used.
        `sort` is created (the default) or count; a `-` before it puts the latest, or the sets that want the
        most workers, first."""
        return self._pages(WorkerSet, "/worker-sets", sort=sort)

    @operation
    def scale_worker_set(
        self,
        workers: AnyWorkerSet,
        count: int | None = None,
        *,
        min_count: int | None = None,
        max_count: int | None = None,
    ) -> Steps[WorkerSet]:
        """Change how many workers the set keeps. Workers that leave finish their calls first."""
        asked = {"count": count, "min_count": min_count, "max_count": max_count}
        body = {name: value for name, value in asked.items() if value is not None}
        return decode(WorkerSet, (yield from self._ask("PATCH", (yield from self._set_path(workers)), body)))

    @operation
    def signal_worker_set(self, workers: AnyWorkerSet, value: float) -> Steps[WorkerSet]:
        """Tell a set that scales by `signal` the number that it follows, such as the length of a queue."""
        path = yield from self._set_path(workers)
        return decode(WorkerSet, (yield from self._ask("POST", f"{path}/signal", {"value": value})))

    @operation
    def end_worker_set(self, workers: AnyWorkerSet) -> Steps[WorkerSet]:
        """Cancel its workers; the set is over when they are gone."""
        return decode(WorkerSet, (yield from self._ask("DELETE", (yield from self._set_path(workers)))))

    @operation
    def call_worker(
        self,
        workers: AnyWorkerSet,
        method: str,
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        role: str = "",
        timeout_seconds: float = 60.0,
        routing: str = "least_queue",
        pickled: bool = True,
    ) -> Steps[Any]:
        """Call a method in one of the workers, and return what it returns.

        Arguments and result are pickled, which needs the scope `tasks:code`; with `pickled=False` they are
        JSON. Arguments that are too large for a request travel as objects, and arrive as they are; a result
        larger than `limits.result_bytes` is an ObjectRef (in JSON `{"object": id}`). `routing` may be
        `round_robin`. A name of the set is looked up at each call, its id is not. Sent once. Raises
        CallFailed if the method raised, if its time was over, or if the worker was lost; Unreachable if no
        worker is ready in time.
        """
        body: dict[str, Any] = {"method": method, "timeout_seconds": timeout_seconds, "routing": routing}
        body |= {"role": role} if role else {}
        text = _call_body(body, method, args, kwargs or {}, pickled=pickled)
        if len(text) > MAX_BODY_BYTES:
            small = yield from small_arguments(self._send, args, kwargs or {}, pickles=pickled)
            text = _call_body(body, method, *small, pickled=pickled)
        path = yield from self._set_path(workers)
        call = Call("POST", f"{path}/call", body=text, patience_seconds=timeout_seconds, repeatable=False)
        raw = (yield from self._send(call)).json()
        packed = raw.get("data_base64")
        if packed is None:
            return raw["result"]
        try:
            return cloudpickle.loads(base64.b64decode(packed))
        except Exception as fault:  # to unpickle may raise anything, also exceptions of other libraries
            raise ResultUnreadable(f"{method} in worker {raw['worker']}", fault) from fault

    def workers(self, workers: AnyWorkerSet, *, role: str = "", **options: Any) -> "Workers":
        """Return a handle on which the methods can be called by name; `options` are those of `call_worker`.

        await broker.workers(solvers, timeout_seconds=5).solve(problem)  # with an AsyncBroker
        """
        return Workers(self, workers, {"role": role, **options})

    def _set_path(self, workers: AnyWorkerSet) -> Steps[str]:
        return f"/worker-sets/{path_part((yield from set_meant(self._ask, workers)))}"


class Workers:
    """A handle whose methods call those of the workers' objects. Arguments by name are passed to the
    method."""

    def __init__(self, broker: Any, workers: AnyWorkerSet, options: Mapping[str, Any]) -> None:
        self._broker = broker
        self._workers = workers
        self._options = options

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self._call, method)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._broker.call_worker(self._workers, method, *args, kwargs=kwargs, **self._options)


def _call_body(
    body: Mapping[str, Any], method: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, pickled: bool
) -> bytes:
    """Return the body of a call of a method. Raises WrongArgument if the arguments cannot be sent."""
    given = _arguments(method, args, kwargs, pickled=pickled)
    return json.dumps({**body, **given}, allow_nan=False).encode()


def _arguments(
    method: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, pickled: bool
) -> dict[str, Any]:
    """Return the fields of the body that hold the arguments. Raises WrongArgument if they cannot be sent."""
    try:
        if pickled:
            return {"pickled": base64.b64encode(cloudpickle.dumps((args, dict(kwargs)))).decode()}
        plain = {"args": [*map(as_json, args)], "kwargs": {name: as_json(it) for name, it in kwargs.items()}}
        json.dumps(plain, allow_nan=False)
        return plain
    except Exception as error:  # objects may raise anything when they are pickled
        how, fails = ("pickled", is_not_pickled) if pickled else ("written as JSON", is_not_json)
        part = faulty_part(call_parts(args, kwargs), fails) or "an argument"
        raise WrongArgument(f"{part} of {method} cannot be {how} ({error}); pass plain values") from None
