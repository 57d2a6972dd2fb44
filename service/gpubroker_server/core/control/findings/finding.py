"""What is wrong with the fleet: findings, each with its cause, its evidence and a remedy."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from types import MappingProxyType

from gpubroker_server.core.domain.units import Instant

MOST_OF_A_KIND = 20
"""What is wrong everywhere need not be said of each."""


class Severity(StrEnum):
    """Published; the worst first."""

    CRITICAL = "critical"
    """Work is lost or cannot be taken."""
    WARNING = "warning"
    """Work waits, or the fleet is used badly."""
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    kind: str
    """Published, such as `gpu-held-idle`."""
    subject: str
    """The device, node, task, model or address that it is about."""
    severity: Severity
    cause: str
    """A sentence."""
    evidence: Mapping[str, str | float]
    """What was measured."""
    remedy: str
    """A command, or a sentence where no command helps."""
    first_seen: Instant | None = None
    """Since when it is known to be so; None: not known."""
    tenant: str = ""
    """Of the task that it is about, which is not shown to others; empty: it is about no task."""

    @property
    def about(self) -> tuple[str, str]:
        """By which it is known again."""
        return self.kind, self.subject


Evidence = Mapping[str, str | float]
NO_EVIDENCE: Evidence = MappingProxyType({})


def _of(
    severity: Severity, kind: str, subject: str, cause: str, remedy: str, evidence: Evidence = NO_EVIDENCE
) -> Finding:
    return Finding(kind, subject, severity, cause, evidence, remedy)


critical, warning, note = (partial(_of, severity) for severity in Severity)


def remember(
    before: Mapping[tuple[str, str], Instant], found: Sequence[Finding], now: Instant
) -> tuple[list[Finding], dict[tuple[str, str], Instant]]:
    """The findings with when each was first seen, the worst first; and what to remember of them. One that is
    gone is forgotten: if it comes back, it is new."""
    after = {one.about: one.first_seen or before.get(one.about, now) for one in found}
    order = list(Severity)
    dated = [replace(one, first_seen=after[one.about]) for one in found]
    dated.sort(key=lambda one: (order.index(one.severity), one.first_seen, one.kind, one.subject))
    return dated, after


def first_of_each_kind(found: Iterable[Finding]) -> list[Finding]:
    """MOST_OF_A_KIND at most; of those that the caller may see."""
    kept, count = [], Counter[str]()
    for one in found:
        count[one.kind] += 1
        if count[one.kind] <= MOST_OF_A_KIND:
            kept.append(one)
    return kept
