"""Priorities as people write them."""

import pytest
from gpubroker_server.core.domain.policy import BAND_NAMES, priority_of


@pytest.mark.parametrize(
    ("text", "priority"),
    [("0", 0), ("100", 100), ("batch", BAND_NAMES["batch"]), ("101", None), ("0001", None), ("²", None)],
)
def test_a_priority_is_a_number_or_the_name_of_a_band(text: str, priority: int | None) -> None:
    assert priority_of(text) == priority
