"""Findings about the fleet. Each has a cause, evidence and a remedy."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from types import MappingProxyType

from gpubroker.wire.fleet import Diagnosis
from msgspec.structs import replace

from gpubroker_server.core.domain.units import Instant

MAX_OF_A_KIND = 20
"""The most findings of one kind that are listed. A fault of the whole fleet need not be listed for each
node."""


class Severity(StrEnum):
    """The severity of a finding, the worst first. The names are published."""

    CRITICAL = "critical"
    """Work is lost or cannot be taken."""
    WARNING = "warning"
    """Work waits, or the fleet is used badly."""
    NOTE = "note"


class Finding(Diagnosis, frozen=True):
    """A diagnosis, with the time since which it is known."""

    first_seen: Instant | None = None
    """The time at which the finding was first seen; None if that time is unknown."""
    tenant: str = ""
    """The tenant that the finding is about; other tenants do not see it. Empty if it is about no tenant."""

    @property
    def about(self) -> tuple[str, str]:
        """The kind and the subject, by which a finding is recognized again."""
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
    """Return the findings with the time at which each was first seen, the worst first, and these times for
    the next call. A finding that is gone is forgotten; if it comes back, it is new."""
    after = {finding.about: finding.first_seen or before.get(finding.about, now) for finding in found}
    order = [severity.value for severity in Severity]
    dated = [replace(finding, first_seen=after[finding.about]) for finding in found]
    dated.sort(
        key=lambda finding: (order.index(finding.severity), finding.first_seen, finding.kind, finding.subject)
    )
    return dated, after


def first_of_each_kind(found: Iterable[Finding]) -> list[Finding]:
    """Return at most MAX_OF_A_KIND findings of each kind, in order."""
    listed, count = [], Counter[str]()
    for finding in found:
        count[finding.kind] += 1
        if count[finding.kind] <= MAX_OF_A_KIND:
            listed.append(finding)
    return listed
