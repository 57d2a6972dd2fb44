"""First guesses at what a model needs."""

import pytest
from gpubroker_server.core.domain.models import first_guess_mb
from gpubroker_server.core.domain.units import Mib


@pytest.mark.parametrize(
    ("file_bytes", "guess_mb"),
    [(None, 512), (0, 512), (400 * 2**20, 512), (4096 * 2**20, 5120), (4096 * 2**20 + 1, 5121)],
)
def test_a_model_is_taken_for_a_quarter_more_than_its_files_and_for_no_less_than_a_small_one(
    file_bytes: int | None, guess_mb: int
) -> None:
    assert first_guess_mb(file_bytes, Mib(512)) == guess_mb
