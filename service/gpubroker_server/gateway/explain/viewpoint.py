"""The view of the core's findings about a task, limited to what the holder of a token may see."""

from typing import Any

from gpubroker.wire.answered import Time
from gpubroker.wire.explanations import (
    Blocker,
    DeviceHolder,
    OtherRun,
    Place,
    PlacedDevice,
    Preemption,
    ProtectedRun,
)
from gpubroker.wire.explanations import DeviceVerdict as ShownDevice
from gpubroker.wire.explanations import RankVerdict as ShownRank
from gpubroker.wire.explanations import Remedy as ShownRemedy
from gpubroker.wire.forecasts import Expected
from msgspec import Struct
from msgspec.structs import asdict

from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.policy import band_of
from gpubroker_server.core.domain.task import Placement, Task
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.explain.advice import Advice
from gpubroker_server.core.explain.diagnosis import RankVerdict
from gpubroker_server.core.explain.explain import DeviceVerdict, Explanation
from gpubroker_server.core.explain.preemption_verdict import PreemptionVerdict
from gpubroker_server.core.explain.remedy_planner import Remedy
from gpubroker_server.core.planning.forecasts.forecast_rounds import ExpectedStart
from gpubroker_server.core.planning.forecasts.run_estimates import Remaining
from gpubroker_server.core.planning.gangs.gang_search import Gang
from gpubroker_server.core.planning.nodes.victims import lost_gpu_seconds
from gpubroker_server.core.world.ledger import Holding
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.quarantine import awaited_by_lease
from gpubroker_server.gateway.status.task_view import expected_view, forecasts_views, priority_now
from gpubroker_server.http.identity import Identity
from gpubroker_server.http.times import Moment

NO_ADVICE: dict[str, Any] = {"start": None, "start_record": None, "preemption": None, "remedies": ()}


def viewpoint(parts: Parts, viewer: Identity) -> "Viewpoint":
    """Return the viewpoint of a request. Raises Problem follower-stale if the World is too old."""
    return Viewpoint(parts.world, viewer, parts.clock.now(), parts.freshness.moment())


class Viewpoint(Struct, frozen=True):
    """The World, and the caller to whom it is shown. Runs of other tenants are shown without id and name,
    unless the token has the scope admin."""

    world: World
    viewer: Identity
    now: Instant
    moment: Moment

    def outlook(
        self, explanation: Explanation, advice: Advice | None = None, start: ExpectedStart | None = None
    ) -> dict[str, Any]:
        """Return the fields that explanations and simulations have in common. `start` is the expected start
        of a task without advice."""
        expected = self.expected(start if advice is None else advice.start)
        records = () if expected is None else forecasts_views(self.world)
        return {
            "reason": explanation.reason,
            "message": explanation.message,
            "position": explanation.position,
            "start": expected,
            "start_record": next(
                (record for record in records if expected and record.basis == expected.basis), None
            ),
            "preemption": None if advice is None else self._preemption(advice.preemption),
            "remedies": () if advice is None else self.remedies(advice),
            "blockers": tuple(
                Blocker(blocker.reason, blocker.reason.tier, blocker.message)
                for blocker in explanation.blockers
            ),
            "quota": explanation.quota,
            "ranks": tuple(map(self._rank, explanation.ranks)) or None,
            "devices": ()
            if advice is None
            else tuple(self._device(device, advice) for device in explanation.devices),
            "evaluated_at": Time.at(self.now),
            "queue_length": explanation.queue_length,
            "as_of": self.moment["as_of"],
            "age_seconds": self.moment["age_seconds"],
            "log_position": self.moment["position"],
        }

    def expected(self, expected: Remaining | ExpectedStart | None) -> Expected | None:
        return None if expected is None else expected_view(expected, self.now)

    def remedies(self, advice: Advice) -> tuple[ShownRemedy, ...]:
        return tuple(map(self._remedy, advice.remedies))

    def place(self, place: Placement) -> Place:
        devices = ((key, self.world.ledgers[key].device.index, mb) for key, mb in place.devices)
        return Place(place.node, tuple(PlacedDevice(*device) for device in devices))

    def places(self, places: Gang | None) -> tuple[Place, ...]:
        return tuple(map(self.place, places or ()))

    def run(self, run: Task) -> OtherRun:
        named = self.viewer.may_see(run.tenant)
        return OtherRun(
            id=run.id if named else None,
            name=run.name if named else None,
            priority=run.priority,
            band=band_of(run.priority)[0],
            gpu_mb=sum(lease.mb for lease in self.world.leases_of(run)),
            node=run.node,
            lost_gpu_seconds=round(lost_gpu_seconds(run, self.now), 3),
        )

    def _preemption(self, verdict: PreemptionVerdict) -> Preemption:
        runs = (ProtectedRun(**asdict(self.run(run.run)), shield=run.shield) for run in verdict.runs)
        return Preemption(verdict.why, verdict.message, verdict.counts, tuple(runs))

    def _remedy(self, remedy: Remedy) -> ShownRemedy:
        return ShownRemedy(
            change=remedy.change,
            effect="starts_later" if remedy.after else "starts" if remedy.places else "preempts",
            message=remedy.message,
            places=self.places(remedy.places),
            victims=tuple(map(self.run, remedy.victims)),
            after=None if remedy.after is None else self.run(remedy.after),
            within=self.expected(remedy.within),
        )

    def _rank(self, verdict: RankVerdict) -> ShownRank:
        place, blocker = verdict.place, verdict.blocker
        message = blocker.message if blocker else "fits" if place else "the gang can start without it"
        shown = None if place is None else self.place(place)
        return ShownRank(verdict.rank, shown, None if blocker is None else blocker.reason, message)

    def _device(self, verdict: DeviceVerdict, advice: Advice) -> ShownDevice:
        ledger, judged, need_mb, free_mb = verdict.finding
        device = ledger.device
        return ShownDevice(
            key=device.key,
            node=device.node,
            index=device.index,
            kind=device.kind,
            verdict=judged,
            message=verdict.message,
            need_mb=need_mb,
            free_mb=free_mb,
            allocatable_mb=device.allocatable_mb,
            free_in=self.expected(advice.free_in.get(device.key)),
            holders=tuple(self._holder(held, advice) for held in verdict.holders),
        )

    def _holder(self, holding: Holding, advice: Advice) -> DeviceHolder:
        lease = holding.lease
        named, priority = self.viewer.may_see(lease.tenant), priority_now(self.world, lease)
        task = self.world.tasks.get(TaskId(lease.holder)) if named else None
        is_quarantined = lease.state is LeaseState.QUARANTINED
        return DeviceHolder(
            id=lease.holder if named else None,
            name=None if task is None else task.name,
            priority=priority,
            band=band_of(priority)[0],
            gpu_mb=holding.occupied_mb,
            stopping=holding.is_leaving,
            quarantine=awaited_by_lease(self.world).get(lease.key) if is_quarantined else None,
            ends=self.expected(advice.expected_ends.of_holding(holding).within(self.now)),
        )
