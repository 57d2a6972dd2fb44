"""Sizes as the service and the command line read them."""

import pytest
from gpubroker import units


@pytest.mark.parametrize(
    ("text", "mb"), [("18GiB", 18_432), ("512", 512), ("1.5 TB", 1_430_512), ("1k", 1), ("2g", 2048)]
)
def test_a_size_in_mib_is_rounded_up(text: str, mb: int) -> None:
    assert units.size_mb(text) == mb


@pytest.mark.parametrize("text", ["", "18x", "-1", "1.", f"{'9' * 400}GiB"])
def test_other_text_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="write 18GiB, 512MiB or 18432"):
        units.size_mb(text)
