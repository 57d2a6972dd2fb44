"""What the operator and the token allow a submit to do. Raises Problem; says nothing about capacity."""

from fnmatch import fnmatchcase
from functools import lru_cache

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.problems import Fault, Problem
from gpubroker_server.gateway.http.routing import Call
from gpubroker_server.gateway.parts import GatewayParts
from gpubroker_server.gateway.submission.task_body import Command, Entrypoint, Function, Run


def check_run(call: Call, run: Run) -> None:
    match run:
        case Entrypoint():
            _check_entrypoint(call.parts.allowed_entrypoints, run.entrypoint)
        case Command():
            call.require(Scope.TASKS_COMMAND, "submitting a command")
        case Function():
            call.require(Scope.TASKS_CODE, "submitting a function")
            _check_pickle(call.parts, run)


def highest_priority(call: Call, tenant: str | None = None) -> int:
    """The most that whoever asks may give a task of its tenant, or of this one: both token and tenant may
    have a cap."""
    identity = call.identity
    return min(identity.max_priority, call.parts.policy.tenant(tenant or identity.tenant).max_priority)


def check_priority(
    call: Call, priority: int, tenant: str | None = None, *, at: str = "/priority", said: str = ""
) -> None:
    """As `highest_priority`; `at` is where in the request the priority stands, or would. `said`: what has
    it, where the request does not name it."""
    identity = call.identity
    if priority <= highest_priority(call, tenant):
        return
    name = tenant or identity.tenant
    asked = said or f"priority {priority} is"
    cap = call.parts.policy.tenant(name).max_priority
    if cap < min(priority, identity.max_priority):
        raise Problem(
            "priority-not-allowed",
            f'{asked} above {cap}, the cap of tenant "{name}"; '
            "ask for less, or have the operator raise its max_priority (setting policy.tenants)",
            errors=[Fault(pointer=at, detail=f"at most {cap}", code="above-cap")],
        )
    raise Problem(
        "priority-not-allowed",
        f'{asked} above {identity.max_priority}, the cap of token "{identity.name}"; '
        "ask for less, or have an admin make a token with a higher max_priority",
        errors=[Fault(pointer=at, detail=f"at most {identity.max_priority}", code="above-cap")],
    )


def check_stream(policy: Policy, stream: str) -> None:
    known = [name for name, _ in policy.streams]
    if stream and stream not in known:
        detail = f'there is no work stream "{stream}"; configured are: {", ".join(known) or "none"}'
        raise Problem(
            "validation-failed", detail, errors=[Fault(pointer="/stream", detail=detail, code="unknown")]
        )


def _check_entrypoint(patterns: tuple[str, ...], entrypoint: str) -> None:
    if _is_allowed(patterns, entrypoint):
        return
    allowed = ", ".join(patterns) or "nothing yet"
    detail = f'"{entrypoint}" is not allowed; the operator allows {allowed} (setting entrypoints)'
    fault = Fault(pointer="/run/entrypoint", detail=detail, code="entrypoint-not-allowed")
    raise Problem("entrypoint-not-allowed", detail, errors=[fault])


@lru_cache(1024)
def _is_allowed(patterns: tuple[str, ...], entrypoint: str) -> bool:
    return any(_matches(entrypoint, pattern) for pattern in patterns)


def _matches(entrypoint: str, pattern: str) -> bool:
    """A wildcard left of the colon covers whole packages; right of it, name by name.

    With `jobs:*`, `jobs:os.system` would otherwise reach whatever the module imports.
    """
    module, _, path = entrypoint.partition(":")
    wanted_module, _, wanted_path = pattern.partition(":")
    names, wanted_names = path.split("."), wanted_path.split(".")
    return (
        fnmatchcase(module, wanted_module)
        and len(names) == len(wanted_names)
        and all(map(fnmatchcase, names, wanted_names))
    )


def _check_pickle(parts: GatewayParts, run: Function) -> None:
    """Code pickled by another Python minor cannot be opened; nor can what a newer major cloudpickle wrote."""
    if run.python != parts.python:
        raise _mismatch(
            "python",
            f"the function was pickled by Python {run.python} and would be opened by Python {parts.python}; "
            f"submit it from Python {parts.python}, or name an entrypoint instead",
        )
    if run.cloudpickle is not None and _major(run.cloudpickle) > _major(parts.cloudpickle):
        raise _mismatch(
            "cloudpickle",
            f"the function was pickled by cloudpickle {run.cloudpickle} and would be opened by "
            f"{parts.cloudpickle}, which does not know all it writes; install cloudpickle "
            f"{_major(parts.cloudpickle)} where you submit, or name an entrypoint instead",
        )


def _mismatch(field: str, detail: str) -> Problem:
    fault = Fault(pointer=f"/run/{field}", detail=detail, code=f"{field}-mismatch")
    return Problem("python-mismatch", detail, errors=[fault])


def _major(version: str) -> int:
    return int(version.partition(".")[0])
