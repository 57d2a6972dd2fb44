"""Which reports a process with user code may write, and what happens to anything else."""

import pytest
from gpubroker.runtime.messages import (
    Report,
    RunKey,
    carriable,
    checkpointed,
    ended,
    failed,
    is_report,
    plain_text,
    progressed,
    ready,
    started,
)
from gpubroker.runtime.outcome import succeeded

KEY = RunKey("t", 1, 0)

SAID: list[Report] = [
    started(KEY, 42),
    ready(KEY, "10.0.0.1:4711"),
    progressed(KEY, None, ""),
    progressed(KEY, 0.5, "x" * 1000),
    checkpointed(KEY, 1_000_001, "abc", b"state", None),
    checkpointed(KEY, 1_000_001, "abc", None, "s3://bucket"),
    ended(KEY, succeeded(1, "json", 100, bytes.hex), b"log"),
    ended(KEY, failed("exception", "a\0b" * 5000, "\ud800" * 100_000), b""),
]


@pytest.mark.parametrize("report", SAID)
def test_a_report_of_the_runtime_is_passed_on_unchanged(report: Report) -> None:
    assert is_report(report)
    assert carriable(report) == report


@pytest.mark.parametrize(
    "report",
    [
        ("checkpointed", *KEY, 1.0, 7, "abc", None, object()),
        ("checkpointed", *KEY, 1.0, 7, "abc", None, "a\0b"),
        ("checkpointed", *KEY, 1.0, 2**64, "abc", b"", None),
        ("progressed", *KEY, 1.0, float("nan"), ""),
        ("progressed", *KEY, float("inf"), 0.5, ""),
        ("progressed", *KEY, 1.0, 0.5, "x" * 501),
        ("ended", *KEY, 1.0, "succeeded", 5, "json", None, b""),
        ("ended", *KEY, 1.0, "gone", b"", "json", None, b""),
        ("ended", *KEY, 1.0, "failed", None, "json", ("exception", 3, ""), b""),
        ("gone", *KEY, 1.0, "process_absent", ()),
        ("started", *KEY, 1.0),
    ],
)
def test_a_malformed_report_fails_its_run(report: Report) -> None:
    assert not is_report(report)
    told = carriable(report)
    assert (told[:4], told[5], is_report(told)) == (("ended", *KEY), "failed", True)


@pytest.mark.parametrize("report", [None, (), ("started",), ("ended", "t", "1", 0, 1.0), ["a", "list"]])
def test_a_malformed_report_that_names_no_run_is_dropped(report: Report) -> None:
    assert carriable(report) == ("nonsense",)


def test_plain_text_keeps_what_every_database_takes() -> None:
    assert plain_text("größe\n\t\U0001f600", 100) == "größe\n\t\U0001f600"
