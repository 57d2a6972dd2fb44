"""Submissions, and a fleet of one node that admission asks about."""

from typing import Any

from gpubroker.wire.forecasts import Sizing
from gpubroker.wire.policy import TaskMaximum
from gpubroker_server.core.admission.admit import AdmissionPolicy, admit
from gpubroker_server.core.admission.defaults import Defaults, NamedDefaults
from gpubroker_server.core.admission.facts import Facts, Refused
from gpubroker_server.core.admission.feasibility import check
from gpubroker_server.core.admission.permissions import Permissions
from gpubroker_server.core.admission.pools import largest_share
from gpubroker_server.core.admission.sizing import Sketches, learned_size
from gpubroker_server.core.admission.submission import Sender, Submission
from gpubroker_server.core.domain.demand import Demand, need_mb
from gpubroker_server.core.domain.policy import CustomLimit, Policy, Pool, TenantPolicy
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.submission import AdmittedTask, RunSpec
from gpubroker_server.core.domain.units import Mib, Seconds, TaskId
from msgspec import Struct

from tests.builders import GIB, NOW, a_device, a_node

POLICY = Policy(
    custom_limits=(CustomLimit("seat", 2.0, priority_threshold=70),),
    pools=(Pool("lab", kinds=("H100",), gpus=1),),
    maximum=TaskMaximum(max_retries=5),
    tenants=(
        TenantPolicy("acme", "labs", guaranteed_mb=Mib(20 * GIB), borrow_mb=Mib(0)),
        TenantPolicy("modest", max_priority=69),
    ),
)
DEFAULTS = Defaults(
    priority=50,
    max_retries=1,
    model_types={
        "llm": NamedDefaults(
            priority=79, gpu_mb=8192, cpu=2.0, memory_mb=Mib(4096), timeout_seconds=Seconds(900.0)
        )
    },
    profiles={
        "scorer": NamedDefaults(cpu=1.0, gpus=0, max_retries=2, max_concurrency=100),
        "trainer": NamedDefaults(gpus=1),
    },
)
RULES = AdmissionPolicy(Permissions(POLICY, ("myteam.*:*",), "3.11", "3.1", ("SEED",)), DEFAULTS)
CALL = RunSpec("entrypoint", "myteam.training:train", arguments=b"{}")
NEW = TaskId("new")


class Token(Struct, frozen=True):
    """A token of a tenant, with its scopes; `*` stands for all of them."""

    scopes: tuple[str, ...] = ("*",)
    tenant: str = "default"
    name: str = "ann"
    max_priority: int = 100

    def may(self, scope: str) -> bool:
        return scope in self.scopes or "*" in self.scopes


ANYBODY = Token()


class OneNode(Struct, frozen=True):
    """A fleet of one node with one H100, and what was learned on it."""

    sketches: Sketches = {}
    pythons: dict[str, str] = {}
    """The Python that nodes have found in environments, by key."""

    def refusal(self, demand: Demand) -> Refusal | None:
        return check(demand, [a_device()], [a_node()], POLICY)

    def counted_mb(self, demand: Demand) -> int:
        ranks = demand.bundles or (demand,)
        return sum(rank.gpus * (need_mb(rank, a_device()) or 0) for rank in ranks if rank.gpus)

    def gpu_share(self, demand: Demand) -> float:
        return largest_share(demand, [a_device()])

    def python_of(self, environment: str) -> str:
        return self.pythons.get(environment, "")

    def learned_size(self, demand: Demand, tenant: str, subject: str) -> Sizing:
        return learned_size(self.sketches, tenant, subject, [a_device()], POLICY)


def judge(
    sender: Sender | None = ANYBODY,
    *,
    spec: RunSpec = CALL,
    fleet: OneNode = OneNode(),  # noqa: B008  # frozen
    rules: AdmissionPolicy = RULES,
    known: dict[str, Any] | None = None,
    **fields: Any,
) -> AdmittedTask | Refused:
    """Judge a submission with these fields. `known`: further facts."""
    tenant = fields.pop("tenant", "default" if sender is None else sender.tenant)
    facts = Facts(NEW, NOW, fleet, sender, **(known or {}))
    return admit(Submission(tenant, spec, **fields), facts, rules)


def admitted(*args: Any, **fields: Any) -> AdmittedTask:
    found = judge(*args, **fields)
    assert isinstance(found, AdmittedTask), found
    return found


def refused(*args: Any, **fields: Any) -> Refused:
    found = judge(*args, **fields)
    assert isinstance(found, Refused), found
    return found
