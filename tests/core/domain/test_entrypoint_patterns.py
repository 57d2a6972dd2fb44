"""Which entrypoints the operator's patterns allow."""

import pytest
from gpubroker_server.core.domain.submission import (
    is_entrypoint_allowed,
    named_patterns,
    withdrawn_entrypoints,
)


@pytest.mark.parametrize(
    ("pattern", "entrypoint", "allowed"),
    [
        ("jobs:train", "jobs:train", True),
        ("jobs:*", "jobs:train", True),
        ("team.*:*", "team.vision.jobs:train", True),
        ("jobs:*.run", "jobs:Job.run", True),
        ("jobs:*", "jobs:os.system", False),
        ("jobs:*", "jobs.more:train", False),
        ("team.*:*", "team:train", False),
        ("jobs:train", "jobs:Train", False),
    ],
)
def test_wildcard_covers_packages_before_the_colon_and_one_name_after_it(
    pattern: str, entrypoint: str, allowed: bool
) -> None:
    assert is_entrypoint_allowed(("other:f", pattern), entrypoint) is allowed


def test_nothing_is_allowed_without_patterns() -> None:
    assert not is_entrypoint_allowed((), "jobs:train")
    assert (named_patterns(()), named_patterns(("a:*", "b:f"))) == ("nothing yet", "a:*, b:f")


def test_withdrawn_entrypoints_come_with_their_tasks_most_frequent_first() -> None:
    waiting = {"demo:a": 1, "jobs:train": 9, "demo:c": 5, "demo:b": 5}
    assert withdrawn_entrypoints(("jobs:*",), waiting) == [("demo:b", 5), ("demo:c", 5), ("demo:a", 1)]
