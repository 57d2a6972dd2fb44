"""First guesses at what a model needs."""

import pytest
from gpubroker_server.core.domain.models import first_guess_mb
from gpubroker_server.core.domain.units import Mib


@pytest.mark.parametrize(
    ("file_bytes", "guess_mb"),
    [(None, 512), (0, 512), (400 * 2**20, 512), (4096 * 2**20, 5120), (4096 * 2**20 + 1, 5121)],
)
def test_a_models_size_is_estimated_as_its_files_plus_a_quarter_and_at_least_the_minimum(
    file_bytes: int | None, guess_mb: int
) -> None:
    assert first_guess_mb(file_bytes, Mib(512)) == guess_mb
