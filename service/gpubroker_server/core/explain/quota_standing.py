"""How one task stands against its tenant's quota, in figures."""

from dataclasses import dataclass

from gpubroker_server.core.domain.units import in_gib
from gpubroker_server.core.planning.quota import Allowance, Quotas
from gpubroker_server.core.planning.survey import Survey


@dataclass(frozen=True, slots=True)
class QuotaStanding:
    tenant: str
    cohort: str
    """Empty: nobody lends it anything."""
    allowance: Allowance
    counts_mb: int
    """What the task would count: on the largest GPUs that it may use; of a gang, its least ranks."""

    @property
    def is_short(self) -> bool:
        return self.counts_mb > self.allowance.left_mb

    @property
    def message(self) -> str:
        found = self.allowance
        borrows = f" and borrows from cohort {self.cohort}" if self.cohort else ""
        return (
            f"counts {in_gib(self.counts_mb)}; tenant {self.tenant}, which is guaranteed "
            f"{in_gib(found.guaranteed_mb)}{borrows}, has {in_gib(found.claimed_mb)} and may take "
            f"{in_gib(max(0, found.left_mb))} more"
        )


def quota_of(seen: Survey) -> QuotaStanding | None:
    """None for a task without GPUs, and for a tenant without a quota."""
    task, policy = seen.task, seen.policy
    if not any(part.gpus for part in task.demand.bundles or (task.demand,)):
        return None
    quotas = Quotas(seen.draft, policy)
    allowance = quotas.of(task.tenant, task.priority, task.id) if policy.has_quotas else None
    if allowance is None:
        return None
    return QuotaStanding(
        task.tenant, policy.tenant(task.tenant).cohort, allowance, quotas.need_mb(task.demand)
    )
