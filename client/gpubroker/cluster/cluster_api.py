"""Operations that look at the cluster, and plan for it."""

from collections.abc import Mapping, Sequence
from typing import Any

from gpubroker.transport.decoding import Page, decode, page_of
from gpubroker.transport.exchange import Steps
from gpubroker.transport.operations import Operations, operation, path_part, without_none
from gpubroker.wire.devices import Gpu as Answer
from gpubroker.wire.fleet import AutoscalingDemand, Finding
from gpubroker.wire.nodes import Node, NodeDetail
from gpubroker.wire.plans import FleetPlan
from gpubroker.wire.policy import Policy, Profile, Tenant
from gpubroker.wire.quarantine import Quarantined
from gpubroker.wire.stats import Stats
from gpubroker.wire.targets import Target


class Gpu(Answer, frozen=True):
    """A device, its holders, and its free memory, as the service answered."""

    def _repr_html_(self) -> str:
        from gpubroker.notebook import html_of_list

        return html_of_list([self]) or ""


class ClusterApi(Operations):
    @operation
    def gpus(self, *, idle: bool | None = None, history: str | None = None) -> Steps[Page[Gpu]]:
        """List all devices with their leased, used and free memory, or with `idle` only those that are idle
        (True) or busy (False).

        `history` is the length of the past to show, such as `1h`, which is the maximum. Default: `5m`.
        """
        return (yield from self._whole(Gpu, "/gpus", idle=idle, history=history))

    @operation
    def nodes(
        self, *, history: str | None = None, sort: str | None = None, boot_id: str | None = None
    ) -> Steps[Page[Node]]:
        """List all machines: whether they answer, and how much of them is held and used. `history` is as in
        `gpus`. `sort` is name (the default), cpu, memory_mb, gpu_mb (their free amounts), runs or
        idle_seconds; a `-` before it puts the largest first. With `boot_id`, only nodes on the machine whose
        kernel has this boot id are listed."""
        wanted = {"history": history, "sort": sort, "boot_id": boot_id}
        return (yield from self._whole(Node, "/nodes", **wanted))

    @operation
    def node(self, name: str, *, history: str | None = None) -> Steps[NodeDetail]:
        """Return one machine with its `devices`. Raises Refused (`not-found`). `history` is as in `gpus`."""
        return decode(NodeDetail, (yield from self._ask("GET", f"/nodes/{path_part(name)}", history=history)))

    @operation
    def quarantine(self) -> Steps[Page[Quarantined]]:
        """List holders that count as using memory because they are not confirmed gone, the oldest first."""
        return page_of(Quarantined, (yield from self._ask("GET", "/quarantine")))

    @operation
    def tenants(self) -> Steps[Page[Tenant]]:
        """List quota, holdings, usage and fair share of your tenant; with the scope cluster:read, of all
        tenants."""
        return page_of(Tenant, (yield from self._ask("GET", "/tenants")))

    @operation
    def stats(self) -> Steps[Stats]:
        """Return counts of tasks and memory over the whole cluster."""
        return decode(Stats, (yield from self._ask("GET", "/stats")))

    @operation
    def autoscaling_demand(
        self, *, pool: str | None = None, kind: str | None = None, waited_seconds: float = 0.0
    ) -> Steps[AutoscalingDemand]:
        """Return what an autoscaler needs: the demand that waiting tasks lack, the demand of all tasks, and
        the capacity that could be given back.

        `pool` counts the tasks of this pool alone; an empty name, tasks without a pool. `kind` counts this
        kind of GPU, and demands that may use it. `waited_seconds` counts only tasks that have waited for at
        least this long.
        """
        found = yield from self._ask(
            "GET", "/autoscaling/demand", pool=pool, kind=kind, waited_seconds=waited_seconds
        )
        return decode(AutoscalingDemand, found)

    @operation
    def targets(self) -> Steps[Page[Target]]:
        """List the targets of the fleet and its parts, and whether they are met. `raw` also says what keeps
        new work out (`backpressure`)."""
        return page_of(Target, (yield from self._ask("GET", "/targets")))

    @operation
    def diagnostics(self) -> Steps[Page[Finding]]:
        """List what is wrong with the fleet, the worst first: cause, evidence and remedy."""
        return page_of(Finding, (yield from self._ask("GET", "/diagnostics")))

    @operation
    def policy(self) -> Steps[Policy]:
        """Return what the operator has configured: bands, kinds, pools, limits, defaults."""
        return decode(Policy, (yield from self._ask("GET", "/policy")))

    @operation
    def profiles(self) -> Steps[Page[Profile]]:
        """List the roles that a task may name, with their sizes and limits."""
        return page_of(Profile, (yield from self._ask("GET", "/profiles")))

    @operation
    def ready(self) -> Steps[Mapping[str, str]]:
        """Return once the service can take and run tasks. Raises Unreachable after `retry_seconds`."""
        parts: Mapping[str, str] = (yield from self._ask("GET", "/readyz"))["parts"]
        return parts

    @operation
    def plan(
        self,
        components: Sequence[Mapping[str, Any]],
        fleet: Sequence[Mapping[str, Any]] | None = None,
        *,
        tenant: str | None = None,
    ) -> Steps[FleetPlan]:
        """Say whether these components fit the present fleet, or the one described; nothing is stored.

        `components` and `fleet` have the form of `POST /plan`: `[{"name": "trainer", "count": 4, "resources":
        {"gpus": 1}}]`. The quota and limits of `tenant` apply. Default: the token's tenant, and no tenant for
        a described fleet.
        """
        body = without_none({"components": list(components), "fleet": fleet, "tenant": tenant})
        return decode(FleetPlan, (yield from self._ask("POST", "/plan", body)))
