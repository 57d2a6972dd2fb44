"""What could run here and what may run: capacity, and what the operator and the token allow."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import version

from gpubroker_server.core.domain.demand import Demand, interned
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.submission import EntrypointPatterns, is_entrypoint_allowed, named_patterns
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.explain.admission import check_demand, check_priority, check_times
from gpubroker_server.core.explain.pools import apply_pool
from gpubroker_server.core.planning.tenants.quota import QuotaNeeds, check_quota
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.http.identity import Identity, Scope
from gpubroker_server.gateway.http.problems import Fault, Problem
from gpubroker_server.gateway.submission.task_body import Command, Entrypoint, Function, Run

MAX_CACHED = 4096
"""Distinct demands. When it is full, the cache is emptied."""


class Capacity:
    def __init__(self, world: World, policy: Policy) -> None:
        self._world = world
        self._policy = policy
        self._refusals: dict[Demand, Refusal | None] = {}
        """Valid for one version of the inventory of nodes and devices."""
        self._inventory_version = -1
        self._needs = QuotaNeeds()

    def settled(
        self, demand: Demand, pool: str, tenant: str, labels: Mapping[str, str], *, at: str = "/resources"
    ) -> Demand:
        """The demand with what its pool and its limits add. Raises Problem if the pool does not fit it.

        `at` points to the demand in the body.
        """
        found = apply_pool(demand, pool, tenant, labels, self._policy)
        if isinstance(found, Refusal):
            raise _problem(found, f"{at}/{found.field}")
        return interned(found)

    def check(self, demand: Demand, priority: int, tenant: str, *, at: str = "/resources") -> None:
        """Raises Problem if the demand could never be satisfied at all, at this priority, or for this
        tenant."""
        refusal = self._refusal(demand) or check_priority(demand, priority, self._policy)
        if refusal is None and self._policy.has_quotas and (demand.gpus or demand.bundles):
            counts = self._needs.of(self._world, demand)
            refusal = check_quota(demand, counts, tenant, self._policy)
        if refusal is not None:
            raise _problem(refusal, f"{at}/{refusal.field}")

    def check_times(self, task: Task) -> None:
        """Raises Problem if the timeout, the retries or the grace period exceed the operator's maximum."""
        refusal = check_times(task, self._policy)
        if refusal is not None:
            raise _problem(refusal, f"/{refusal.field}")

    def check_priority(self, demand: Demand, priority: int) -> None:
        """Raises Problem for a priority at which a task would never get what it asks for."""
        refusal = check_priority(demand, priority, self._policy)
        if refusal is not None:
            raise _problem(refusal, "/priority")

    def _refusal(self, demand: Demand) -> Refusal | None:
        world = self._world
        if self._inventory_version != world.inventory_version or len(self._refusals) >= MAX_CACHED:
            self._refusals.clear()
            self._inventory_version = world.inventory_version
        try:
            return self._refusals[demand]
        except KeyError:
            devices = [ledger.device for ledger in world.ledgers.values()]
            refusal = check_demand(demand, devices, world.nodes.values(), self._policy)
            self._refusals[demand] = refusal
            return refusal


def _problem(refusal: Refusal, pointer: str) -> Problem:
    fault = Fault(pointer=pointer, detail=refusal.message, code=refusal.code)
    return Problem(refusal.code, refusal.message, errors=[fault])


@dataclass(frozen=True, slots=True)
class Permissions:
    policy: Policy
    entrypoints: EntrypointPatterns
    """Patterns of `module:function` that tasks may name, such as `myteam.*:*`."""
    env_allowed: tuple[str, ...] = ()
    """Patterns of the environment variables that a token without a scope for code may set."""
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"
    """The Python minor that runs pickled functions."""
    cloudpickle: str = version("cloudpickle")
    """The version that unpickles them."""

    def check_run(self, identity: Identity, run: Run) -> None:
        """Raises Problem if the token or the operator does not allow this run."""
        match run:
            case Entrypoint():
                self._check_entrypoint(run.entrypoint)
            case Command():
                identity.require(Scope.TASKS_COMMAND, "submitting a command")
            case Function():
                identity.require(Scope.TASKS_CODE, "submitting a function")
                self._check_pickle(run)

    def check_env(self, identity: Identity, env: Mapping[str, str]) -> None:
        """Raises Problem for a variable that the token may not set: many make an allowed entrypoint run other
        code (BASH_ENV, PATH, GIT_SSH_COMMAND)."""
        if identity.may(Scope.TASKS_CODE) or identity.may(Scope.TASKS_COMMAND):
            return
        refused = [name for name in env if not any(fnmatchcase(name, known) for known in self.env_allowed)]
        if refused:
            allowed = ", ".join(self.env_allowed) or "none"
            raise Problem(
                "forbidden",
                f'token "{identity.name}" may not set the variables {", ".join(refused)}; without the scope '
                f"tasks:code or tasks:command it may set: {allowed}; leave them out, or have the operator "
                "add them to env_allowed",
                errors=[
                    Fault(pointer=f"/env/{name}", detail="is not in env_allowed", code="env-not-allowed")
                    for name in refused
                ],
            )

    def highest_priority(self, identity: Identity, tenant: str | None = None) -> int:
        """The highest priority that this token may give a task of its tenant, or of `tenant`: both the token
        and the tenant may have a cap."""
        return min(identity.max_priority, self.policy.tenant(tenant or identity.tenant).max_priority)

    def check_priority(
        self,
        identity: Identity,
        priority: int,
        tenant: str | None = None,
        *,
        at: str = "/priority",
        subject: str = "",
    ) -> None:
        """Raises Problem for a priority above `highest_priority`.

        `at` points to the priority in the body. `subject` says what has it, if the body does not name it.
        """
        if priority <= self.highest_priority(identity, tenant):
            return
        name = tenant or identity.tenant
        cap = self.policy.tenant(name).max_priority
        if cap < min(priority, identity.max_priority):
            owner, remedy = f'tenant "{name}"', "have the operator raise its max_priority (policy.tenants)"
        else:
            cap, owner = identity.max_priority, f'token "{identity.name}"'
            remedy = "have an admin make a token with a higher max_priority"
        raise Problem(
            "priority-not-allowed",
            f"{subject or f'priority {priority} is'} above {cap}, the cap of {owner}; "
            f"ask for less, or {remedy}",
            errors=[Fault(pointer=at, detail=f"at most {cap}", code="above-cap")],
        )

    def _check_entrypoint(self, entrypoint: str) -> None:
        if not is_entrypoint_allowed(self.entrypoints, entrypoint):
            problem = Problem(
                "entrypoint-not-allowed", entrypoint=entrypoint, allowed=named_patterns(self.entrypoints)
            )
            code = "entrypoint-not-allowed"
            problem.errors = [Fault(pointer="/run/entrypoint", detail=problem.detail, code=code)]
            raise problem

    def _check_pickle(self, run: Function) -> None:
        """Another Python minor cannot open pickled code, nor can an older major version of cloudpickle."""
        if run.python != self.python:
            raise _mismatch(
                "python",
                f"the function was pickled by Python {run.python} and would be opened by {self.python}; "
                f"submit it from Python {self.python}, or name an entrypoint instead",
            )
        if run.cloudpickle is not None and _major(run.cloudpickle) > _major(self.cloudpickle):
            raise _mismatch(
                "cloudpickle",
                f"the function was pickled by cloudpickle {run.cloudpickle} and would be opened by the older "
                f"{self.cloudpickle}; install cloudpickle {_major(self.cloudpickle)} where you submit, or "
                "name an entrypoint instead",
            )


def _mismatch(field: str, detail: str) -> Problem:
    fault = Fault(pointer=f"/run/{field}", detail=detail, code=f"{field}-mismatch")
    return Problem("python-mismatch", detail, errors=[fault])


def _major(version: str) -> int:
    return int(version.partition(".")[0])
