"""Find the time at which a waiting task is expected to start, and the changes that would help. This is the
costly part of an explanation."""

from collections.abc import Sequence
from heapq import nsmallest

from msgspec import Struct

from gpubroker_server.core.domain.units import DeviceKey, Instant, NodeName, Seconds, TaskId
from gpubroker_server.core.explain.diagnosis import Diagnosis
from gpubroker_server.core.explain.explain import Explanation, is_deferred
from gpubroker_server.core.explain.preemption_verdict import PreemptionVerdict, explain_preemption
from gpubroker_server.core.explain.remedies import remedies
from gpubroker_server.core.explain.remedy_planner import Remedy
from gpubroker_server.core.explain.survey import Survey
from gpubroker_server.core.explain.what_if import WhatIf
from gpubroker_server.core.planning.find_way import Evict, Wait, WaitReason, Way
from gpubroker_server.core.planning.find_way import Start as StartNow
from gpubroker_server.core.planning.forecasts.forecast_rounds import ExpectedStart, expected_start
from gpubroker_server.core.planning.forecasts.forecasts import forecast_alone
from gpubroker_server.core.planning.forecasts.future_capacity import ExpectedEnds
from gpubroker_server.core.planning.forecasts.reservations import Basis, Reservation
from gpubroker_server.core.planning.forecasts.run_estimates import Remaining
from gpubroker_server.core.world.ledger import DeviceLedger

MAX_NODES = 8
"""The most nodes for which a start is forecast. The nodes that have room first are chosen."""


_VERDICTS = {StartNow: "starts", Evict: "preempts", Wait: "waits"}


class Advice(Struct, frozen=True):
    verdict: str
    """`starts`, `preempts` or `waits`. A deferred task waits."""
    way: Way
    """The decision that the planner would take now; for a deferred task, the decision if it were not
    deferred."""
    start: ExpectedStart | None
    """The pledged or forecast start; otherwise the time at which the task has room, unless another task takes
    it. None if that is unknown, as for a task without a forecast whose room is reserved for others."""
    preemption: PreemptionVerdict
    remedies: tuple[Remedy, ...]
    """The remedies; empty if none is needed or none was found."""
    free_in: dict[DeviceKey, Remaining]
    """Device that the task may use -> the time until it has enough memory for the task. Devices for which
    that is unknown are left out."""
    expected_ends: ExpectedEnds

    def message(self, explanation: Explanation) -> str:
        """Return a text about what would become of the task if it were submitted now. `explanation` says what
        the task would wait for."""
        places, eviction = self.way.places, self.way.eviction
        if self.verdict == "starts" and places is not None:
            return (
                f"the task would start now on {', '.join(sorted({placement.node for placement in places}))}"
            )
        if self.verdict == "preempts" and eviction is not None:
            victims = self.preemption.message
            return (
                f"{victims}, and the task would start on {eviction.node}; until then: {explanation.message}"
            )
        return explanation.message


def advise(diagnosis: Diagnosis, highest_priority: int = 100) -> Advice:
    """Return the advice for a pending task, or for one that has not been submitted."""
    survey = diagnosis.survey
    task, draft = survey.task, survey.draft
    what_if = WhatIf(draft, survey.policy, survey.now, survey.forecasts, survey.known)
    way = what_if.way(task)
    expected_ends = ExpectedEnds(draft, survey.policy, survey.now)
    free_in = _free_in(diagnosis.device_survey, expected_ends)
    verdict = "waits" if is_deferred(task, draft.world) else _VERDICTS[type(way)]
    may_start = verdict == "starts"
    return Advice(
        verdict,
        way,
        _at(survey.now) if may_start else _start(survey, way, free_in),
        explain_preemption(survey, way, _ahead(what_if, survey, way)),
        () if may_start else remedies(survey, way, expected_ends, what_if, highest_priority),
        free_in,
        expected_ends,
    )


def _ahead(what_if: WhatIf, survey: Survey, way: Way) -> Sequence[Reservation]:
    return what_if.keeps_from_preempting(survey.task) if _is_reserved(way) else ()


def _is_reserved(way: Way) -> bool:
    return isinstance(way, Wait) and way.reason is WaitReason.RESERVED


def _free_in(survey: Survey, expected_ends: ExpectedEnds) -> dict[DeviceKey, Remaining]:
    ends = {}
    if survey.task.demand.gpus:
        for node in survey.nodes:
            for device in node.open_devices:
                missing_mb = (device.need_mb or 0) - device.free_mb
                end = _end_of_need(device.ledger, missing_mb, survey.task.id, expected_ends)
                if end is not None:
                    ends[device.ledger.device.key] = end
    return ends


def _end_of_need(
    ledger: DeviceLedger, missing_mb: int, task: TaskId, expected_ends: ExpectedEnds
) -> Remaining | None:
    """Return the time until `missing_mb` more are free on a device, without the memory that is being freed
    for other tasks; None if that is unknown."""
    within = Remaining(Seconds(0.0), Seconds(0.0), 0)
    if missing_mb <= 0:
        return within
    if ledger.held_mb() < missing_mb:
        return None
    ends: list[tuple[Remaining, int]] = []
    for holding in ledger.holdings.values():
        if holding.freeing_for is None or holding.freeing_for == task:
            end = expected_ends.of_holding(holding).within(expected_ends.now)
            if end is not None:
                ends.append((end, holding.occupied_mb))
    ends.sort(key=lambda end: end[0].p50_seconds)
    for end, mb in ends:
        if missing_mb <= 0:
            break
        within, missing_mb = _later(within, end), missing_mb - mb
    return within if missing_mb <= 0 else None


def _later(first: Remaining, second: Remaining) -> Remaining:
    """Return the time until both have ended. Its `n` is the smaller one."""
    p50, p90 = max(first.p50_seconds, second.p50_seconds), max(first.p90_seconds, second.p90_seconds)
    return Remaining(p50, p90, min((end.n for end in (first, second) if end.n), default=0))


def _start(survey: Survey, way: Way, free_in: dict[DeviceKey, Remaining]) -> ExpectedStart | None:
    task, now = survey.task, survey.now
    if task.held or task.awaits or survey.draft.world.queue.pause_of(task) is not None:
        return None
    start = expected_start(survey.draft.world, task, survey.forecasts, now)
    if isinstance(way, StartNow):
        start = _at(now)
    elif start is None and isinstance(way, Evict):
        start = _at(way.eviction.deadline_at)
    elif start is None and not _is_reserved(way):
        nodes = survey.draft.world.nodes if task.demand.bundles else _nodes(survey, free_in)
        alone = forecast_alone(survey.draft, task, survey.policy, now, nodes)
        if alone is not None and alone.basis is not Basis.GUESS:
            start = ExpectedStart(alone.start_at, alone.p90_at, alone.n, alone.basis)
    if start is None or task.not_before is None:
        return start
    p50_at, p90_at = max(start.p50_at, task.not_before), max(start.p90_at, task.not_before)
    return start._replace(p50_at=p50_at, p90_at=p90_at)


def _nodes(survey: Survey, free_in: dict[DeviceKey, Remaining]) -> list[NodeName]:
    gpus, candidates = survey.task.demand.gpus, []
    for node in survey.nodes:
        if node.is_usable and node.is_large_enough:
            keys = (device.ledger.device.key for device in node.devices)
            ends = sorted(free_in[key].p50_seconds for key in keys if key in free_in)
            if len(ends) >= gpus:
                candidates.append((ends[gpus - 1] if gpus else 0.0, node.node.name))
    return [name for _, name in nsmallest(MAX_NODES, candidates)]


def _at(instant: Instant) -> ExpectedStart:
    return ExpectedStart(instant, instant, 0, Basis.STATED)
