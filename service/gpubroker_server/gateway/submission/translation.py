"""Translates the body of a submit to a submission, on which admission decides. No default is filled in
here."""

import json
import sys
from collections.abc import Mapping
from importlib.metadata import version
from operator import attrgetter
from typing import Any

from msgspec.structs import replace
from pydantic_core import to_json

from gpubroker_server.core.admission.submission import NOTHING_ASKED, Asked, AskedTimes, Submission
from gpubroker_server.core.domain.demand import NO_CONSTRAINTS, Labels, PlacementConstraints
from gpubroker_server.core.domain.environment import Environment
from gpubroker_server.core.domain.submission import RunSpec
from gpubroker_server.core.domain.task import Dependency, OnFailure
from gpubroker_server.core.domain.units import Mib, TaskId
from gpubroker_server.gateway.submission.named_objects import objects_in_arguments
from gpubroker_server.gateway.submission.resources import Amounts, Resources
from gpubroker_server.gateway.submission.task_body import (
    Command,
    Entrypoint,
    Function,
    GivenEnvironment,
    SimulateTask,
    SubmitTask,
    causes_of,
)
from gpubroker_server.gateway.submission.timing import Timed
from gpubroker_server.http.faults import invalid
from gpubroker_server.http.problems import Fault

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
CLOUDPICKLE = version("cloudpickle")
"""The version of cloudpickle in the service. Runs unpickle with it and with `PYTHON`, unless they bring their
own versions."""

_NO_ARGUMENTS = b'{"args":[],"kwargs":{}}'
_STRICT_JSON = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))
_NO_RUN: Mapping[str, Any] = {"kind": ""}
_ANOTHER_RUN: Mapping[str, Any] = {
    "entrypoint": "", "command": (), "arguments": b"", "arguments_digest": None, "python": "", "objects": (),
    "working_directory": "",
}  # fmt: skip
"""Empty values of all fields that describe a run, so that a specification keeps none of a run that is
replaced."""
_KEPT = tuple(
    name for name in RunSpec.__struct_fields__ if name in SubmitTask.model_fields and name != "environment"
)
"""The fields of a body that a RunSpec takes over unchanged because it has fields of the same names."""
_kept_of = attrgetter(*_KEPT)
_WHERE_FIELDS = frozenset({"kinds", "min_power", "min_device_mb", "nodes", "prefer_kinds", "prefer_nodes"})
_TIMES = frozenset({"not_before", "queue_ttl_seconds", "deadline_at", "deadline_seconds"})


def submission_of(body: SubmitTask | SimulateTask, tenant: str) -> Submission:
    """Return the submission of a body. Raises Problem if JSON arguments contain NaN or an infinity."""
    run = body.run
    fields = _NO_RUN if run is None else _run_fields(run)
    environment = environment_of(body.environment)
    for object in (body.upload, "" if environment is None else environment.project):
        if object:
            fields = {**fields, "objects": (*fields.get("objects", ()), object)}
    return Submission(
        tenant=tenant,
        spec=RunSpec(
            **fields,
            **dict(zip(_KEPT, _kept_of(body), strict=True)),
            roles=tuple(sorted(body.resources.roles)),
            environment=environment,
        ),
        demand=asked_of(body.resources, body.placement),
        name=body.name,
        priority=body.priority,
        max_retries=body.max_retries,
        retry_on=causes_of(body.retry_on),
        timeout_seconds=body.timeout_seconds,
        grace_seconds=body.grace_seconds,
        expected_seconds=body.expected_seconds,
        times=times_of(body),
        after=dependencies_of(body),
        stream=body.stream,
        held=body.held,
        cloudpickle=run.cloudpickle if isinstance(run, Function) else None,
    )


def environment_of(given: GivenEnvironment | None) -> Environment | None:
    """Return the environment that a body states; None if it states none. A name is looked up at admission."""
    if given is None:
        return None
    return Environment(**{**given.model_dump(), "requirements": tuple(given.requirements)})


def with_run_of(run: Entrypoint | Command | Function, spec: RunSpec) -> RunSpec:
    """Return the specification with another run. Raises Problem if JSON arguments contain NaN or an
    infinity."""
    own = {**_ANOTHER_RUN, **_run_fields(run)}
    return replace(spec, **own)


def _run_fields(run: Entrypoint | Command | Function) -> dict[str, Any]:
    """Return the fields of RunSpec that a run of this kind sets. Raises Problem if JSON arguments contain NaN
    or an infinity."""
    match run:
        case Entrypoint():
            arguments = arguments_of(run)
            objects = tuple(objects_in_arguments(arguments).values())
            fields = {"entrypoint": run.entrypoint, "arguments": arguments, "objects": objects}
        case Command():
            fields = {"command": tuple(run.command), "working_directory": run.working_directory or ""}
        case Function():
            fields = {"arguments": run.function, "python": run.python, "objects": tuple(run.objects)}
    return {"kind": run.tag, **fields}


def arguments_of(run: Entrypoint) -> bytes:
    """Return the arguments as JSON for the process. Raises Problem if they contain NaN or an infinity."""
    if not run.args and not run.kwargs:
        return _NO_ARGUMENTS
    text = to_json({"args": run.args, "kwargs": run.kwargs}, inf_nan_mode="constants")
    if b"NaN" not in text and b"Infinity" not in text:
        return text
    try:  # The word may be part of a string, which is allowed.
        return _STRICT_JSON.encode({"args": run.args, "kwargs": run.kwargs}).encode()
    except ValueError:
        detail = "arguments must be JSON values, without NaN, Infinity and numbers beyond 64-bit floats"
        raise invalid(Fault(pointer="/run", detail=detail, code="finite-number")) from None


def asked_of(resources: Resources, placement: str = "pack") -> Asked:
    """Return the resources that a body asks for. If it names roles, each size is the maximum over the
    roles."""
    if not resources.model_fields_set and placement == "pack":
        return NOTHING_ASKED
    asked = _amounts_of(resources.with_sizes(), placement)
    if resources.bundles:
        ranks = [
            (replace(_amounts_of(bundle, placement), profile=bundle.profile), bundle.count)
            for bundle in resources.bundles
        ]
        bundles = tuple(rank for rank, count in ranks for _ in range(count))
        return replace(
            asked,
            pool=resources.pool,
            bundles=bundles,
            strategy=resources.strategy,
            min_ranks=resources.min_ranks,
        )
    return replace(asked, pool=resources.pool) if resources.pool else asked


def _amounts_of(amounts: Amounts, placement: str) -> Asked:
    return Asked(
        gpus=amounts.gpus,
        gpu_mb=amounts.gpu_mb,
        gpu_fraction=amounts.gpu_fraction,
        exclusive=amounts.exclusive,
        cpu=amounts.cpu,
        memory_mb=amounts.memory_mb,
        custom=tuple(sorted(amounts.custom.items())) if amounts.custom else (),
        where=NO_CONSTRAINTS if amounts.model_fields_set.isdisjoint(_WHERE_FIELDS) else _where_of(amounts),
        placement=placement,
    )


def _where_of(amounts: Amounts) -> PlacementConstraints:
    return PlacementConstraints(
        kinds=tuple(amounts.kinds),
        min_power=amounts.min_power,
        min_device_mb=Mib(amounts.min_device_mb),
        nodes=_labels_of(amounts.nodes),
        prefer_kinds=tuple(amounts.prefer_kinds),
        prefer_nodes=_labels_of(amounts.prefer_nodes),
    )


def _labels_of(wanted: Mapping[str, list[str]]) -> Labels:
    return tuple(sorted((label, tuple(sorted(set(values)))) for label, values in wanted.items()))


def times_of(body: Timed) -> AskedTimes | None:
    """Return the times that a body names; None if it names none."""
    if body.model_fields_set.isdisjoint(_TIMES):
        return None
    return AskedTimes(
        not_before=None if body.not_before is None else body.not_before.timestamp(),
        queue_ttl_seconds=body.queue_ttl_seconds,
        deadline_at=None if body.deadline_at is None else body.deadline_at.timestamp(),
        deadline_seconds=body.deadline_seconds,
    )


def dependencies_of(body: Timed) -> tuple[Dependency, ...]:
    """Return the dependencies that a body names. The tasks need not exist."""
    if not body.after:
        return ()
    return tuple(Dependency(TaskId(wanted.task), OnFailure(wanted.on_failure)) for wanted in body.after)
