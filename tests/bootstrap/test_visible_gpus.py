"""Which GPUs a start uses, what decided it, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from gpubroker_server.adapters.nvml.probe import GpuChoice
from gpubroker_server.adapters.ray.agent.node_agent import gpu_choice
from gpubroker_server.bootstrap.compose import ray_options_of
from gpubroker_server.bootstrap.process import which_gpus
from gpubroker_server.bootstrap.start_checks import StartRefused, check_gpus
from gpubroker_server.settings.loading import Settings, load_settings
from gpubroker_server.settings.ray import RaySettings


def settings(**ray: Any) -> Settings:
    return Settings(ray=RaySettings(**ray))


@pytest.fixture(autouse=True)
def _variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")


def choice_of(given: Settings, own_start: Path) -> GpuChoice | None:
    """As an agent of this service makes it."""
    return gpu_choice(ray_options_of(given).agent_config("").on_node("n1"), own_start)


@pytest.mark.parametrize(
    ("ray", "expected"),
    [
        ({}, GpuChoice("1,2", "CUDA_VISIBLE_DEVICES of the service")),
        ({"gpus": ("0", "GPU-5a")}, GpuChoice("0,GPU-5a", "ray.gpus")),
        ({"gpus": ()}, GpuChoice("", "ray.gpus")),
        ({"address": "h:6379"}, GpuChoice("3", "CUDA_VISIBLE_DEVICES of the node")),
        ({"address": "h:6379", "gpus": ("0",)}, GpuChoice("0", "ray.gpus")),
    ],
)
def test_a_setting_goes_before_the_variable_of_service_or_node(
    tmp_path: Path, ray: dict[str, Any], expected: GpuChoice
) -> None:
    start = tmp_path / "environ"
    start.write_bytes(b"PATH=/bin\0CUDA_VISIBLE_DEVICES=3\0")
    assert choice_of(settings(**ray), start) == expected


def test_without_setting_and_variable_all_gpus_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "environ").write_bytes(b"PATH=/bin\0")
    assert choice_of(settings(), tmp_path / "environ") is None
    assert which_gpus(settings()) == []


@pytest.mark.parametrize(
    ("ray", "line"),
    [
        ({}, "GPUs: CUDA_VISIBLE_DEVICES decides which are used: 1,2"),
        ({"gpus": ("0",)}, "GPUs: ray.gpus decides which are used: 0, and not CUDA_VISIBLE_DEVICES=1,2"),
        ({"address": "h:6379"}, "note: CUDA_VISIBLE_DEVICES=1,2 of this service is not used"),
    ],
)
def test_the_start_says_which_of_the_two_decided(ray: dict[str, Any], line: str) -> None:
    [said] = which_gpus(settings(**ray))
    assert said.strip().startswith(line)


def test_a_gpu_that_is_named_twice_is_refused_at_the_start() -> None:
    with pytest.raises(StartRefused, match=r"ray\.gpus names GPU-a twice"):
        check_gpus(settings(gpus=("GPU-a", "1", "GPU-a")))
    with pytest.raises(StartRefused, match="CUDA_VISIBLE_DEVICES names 0 twice"):
        check_gpus(settings(), {"CUDA_VISIBLE_DEVICES": "0, 0"})
    check_gpus(settings(gpus=("0",)), {"CUDA_VISIBLE_DEVICES": "0,0"})
    check_gpus(settings(address="h:6379"), {"CUDA_VISIBLE_DEVICES": "0,0"})


@pytest.mark.parametrize(
    ("written", "read"),
    [("[0, GPU-5a]", ("0", "GPU-5a")), ("0,1", ("0", "1")), ("2", ("2",)), ("[]", ()), ("null", None)],
)
def test_the_setting_is_a_list_a_text_or_one_index(
    tmp_path: Path, written: str, read: tuple[str, ...] | None
) -> None:
    file = tmp_path / "gpubroker.yaml"
    file.write_text(f"ray:\n  gpus: {written}\n")
    assert load_settings(file).ray.gpus == read
