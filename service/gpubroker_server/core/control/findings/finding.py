"""Findings about the fleet, each with its cause, its evidence and a remedy."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from types import MappingProxyType

from gpubroker.wire.fleet import Diagnosis
from msgspec.structs import replace

from gpubroker_server.core.domain.units import Instant

MOST_OF_A_KIND = 20
"""The most findings of one kind that are listed: a fault of the whole fleet need not be listed for each
node."""


class Severity(StrEnum):
    """Published; the worst first."""

    CRITICAL = "critical"
    """Work is lost or cannot be taken."""
    WARNING = "warning"
    """Work waits, or the fleet is used badly."""
    NOTE = "note"


class Finding(Diagnosis, frozen=True):
    """A diagnosis, and since when it is known."""

    first_seen: Instant | None = None
    """The time since which this is known; None if that time is unknown."""
    tenant: str = ""
    """The tenant of the task that the finding is about; other tenants do not see it. Empty: it is about no
    task."""

    @property
    def about(self) -> tuple[str, str]:
        """Return the key by which the same finding is known again."""
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
    after = {finding.about: finding.first_seen or before.get(finding.about, now) for finding in found}
    order = [severity.value for severity in Severity]
    dated = [replace(finding, first_seen=after[finding.about]) for finding in found]
    dated.sort(
        key=lambda finding: (order.index(finding.severity), finding.first_seen, finding.kind, finding.subject)
    )
    return dated, after


def first_of_each_kind(found: Iterable[Finding]) -> list[Finding]:
    """MOST_OF_A_KIND at most; of those that the caller may see."""
    kept, count = [], Counter[str]()
    for finding in found:
        count[finding.kind] += 1
        if count[finding.kind] <= MOST_OF_A_KIND:
            kept.append(finding)
    return kept
