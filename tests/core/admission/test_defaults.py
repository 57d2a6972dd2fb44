"""What a task gets for the fields that its submission leaves out."""

import pytest
from gpubroker_server.core.admission.defaults import Defaults, NamedDefaults, Profile, first
from gpubroker_server.core.domain.units import Mib, Seconds

LLM = NamedDefaults(priority=79, gpu_mb=Mib(8192), timeout_seconds=Seconds(60.0))
DEFAULTS = Defaults(
    model_types={"llm": LLM}, profiles={"scorer": Profile(cpu=2.0, gpus=0), "trainer": Profile(gpus=1)}
)


def test_a_profile_goes_before_the_model_type() -> None:
    assert DEFAULTS.named("llm") == LLM
    assert DEFAULTS.named("other") == NamedDefaults()
    both = DEFAULTS.named("llm", "trainer")
    assert (both.gpus, both.gpu_mb, both.priority) == (1, 8192, 79)


def test_a_profile_without_gpus_takes_no_size_of_one() -> None:
    both = DEFAULTS.named("llm", "scorer")
    assert (both.gpus, both.gpu_mb, both.cpu, both.priority) == (0, None, 2.0, 79)


def test_a_profile_with_a_size_of_gpus_and_without_gpus_contradicts_itself() -> None:
    with pytest.raises(ValueError, match="gpus is 0 and gpu_mb is 8; leave one of them out"):
        Profile(gpus=0, gpu_mb=Mib(8))


def test_first_skips_none_only() -> None:
    assert (first(None, 0, 1), first(None)) == (0, None)
