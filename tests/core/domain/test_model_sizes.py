"""First guesses at what a model needs."""

import pytest
from gpubroker_server.core.domain.models import first_guess_mb, gpus_fault
from gpubroker_server.core.domain.units import Mib


@pytest.mark.parametrize(
    ("file_bytes", "guess_mb"),
    [(None, 512), (0, 512), (400 * 2**20, 512), (4096 * 2**20, 5120), (4096 * 2**20 + 1, 5121)],
)
def test_model_size_guess_is_its_files_plus_a_quarter_and_has_a_minimum(
    file_bytes: int | None, guess_mb: int
) -> None:
    assert first_guess_mb(file_bytes, Mib(512)) == guess_mb


@pytest.mark.parametrize(
    ("seen", "gpus", "said"),
    [
        ([], 1, ""),
        (["GPU-a"], 1, ""),
        (["GPU-a", "GPU-b"], 0, ""),
        (["GPU-a", "GPU-b"], 2, ""),
        (["GPU-b", "GPU-a"], 1, "sees 2 GPUs (GPU-a, GPU-b), and Triton loads a model on each"),
        (["GPU-a"], 2, "sees 1 GPU (GPU-a), and the model's settings say gpus: 2"),
        ([f"GPU-{at}" for at in range(10)], 1, "GPU-7 and 2 more"),
    ],
)
def test_a_lease_is_on_all_gpus_that_the_server_sees(seen: list[str], gpus: int, said: str) -> None:
    fault = gpus_fault("main", seen, gpus)
    assert said in fault
    assert bool(said) is bool(fault)
