"""Findings are remembered as long as they are found."""

from gpubroker_server.core.control.findings.finding import (
    MAX_OF_A_KIND,
    Finding,
    Severity,
    first_of_each_kind,
    remember,
)
from gpubroker_server.core.domain.units import Instant


def a_finding(kind: str, severity: Severity = Severity.WARNING) -> Finding:
    return Finding(kind, "gpu0", severity, "It is idle.", {}, "gpubroker cancel x")


def test_finding_keeps_the_time_it_was_first_seen_until_it_is_gone() -> None:
    found, known = remember({}, [a_finding("a")], Instant(1.0))
    assert [one.first_seen for one in found] == [1.0]
    found, known = remember(known, [a_finding("b"), a_finding("a")], Instant(2.0))
    assert [(one.kind, one.first_seen) for one in found] == [("a", 1.0), ("b", 2.0)]
    found, known = remember(known, [a_finding("b")], Instant(3.0))
    assert known == {("b", "gpu0"): 2.0}
    found, _ = remember(known, [a_finding("a")], Instant(4.0))
    assert found[0].first_seen == 4.0


def test_the_worst_comes_first() -> None:
    found, _ = remember(
        {}, [a_finding("n", Severity.NOTE), a_finding("w"), a_finding("c", Severity.CRITICAL)], Instant(0.0)
    )
    assert [one.kind for one in found] == ["c", "w", "n"]


def test_what_is_wrong_everywhere_is_not_said_of_each() -> None:
    found = [a_finding("a")] * 100 + [a_finding("b")]
    assert first_of_each_kind(found) == [a_finding("a")] * MAX_OF_A_KIND + [a_finding("b")]
