"""What a model's own file says is read as the server would read it."""

from pathlib import Path

import pytest
from gpubroker_server.adapters.triton.model_config import ModelConfig, config_in

FILES = {
    "": ModelConfig(),
    'name: "m"  # a remark: {': ModelConfig(),
    "max_batch_size: 8 instance_group [ { count: 2 kind: KIND_CPU } ]": ModelConfig(on_cpu=True),
    "instance_group { count: 2, gpus: [0, 1] }; instance_group < kind: KIND_CPU >": ModelConfig(),
    "instance_group [ {gpus: 0 gpus: 1}, {} ]": ModelConfig(),
    "ensemble_scheduling { step { model_name: 'a' } step { model_name: \"b\" input_map { key: 'k' } } "
    'step { model_name: "a" } }': ModelConfig(steps=("a", "b")),
    "input [ { name: 'step [ ' dims: [ -1, 3 ] } ] # x [\nensemble_scheduling { step [ { model_name: 'a [1' "
    "input_map [ { key: 'k' value: 'v' } ] } ] }": ModelConfig(steps=("a [1",)),
    "sequence_batching { control_input [ { control [ { fp32_false_true: [ 0, 1 ] } ] } ] }": ModelConfig(),
    "version_policy: { latest { num_versions: 2 } }": ModelConfig(latest=2),
    "version_policy { latest {} }": ModelConfig(),
    "version_policy: { all { } }": ModelConfig(latest=None),
    "version_policy: { specific { versions: [3, 1] } }": ModelConfig(specific=("3", "1")),
}


@pytest.mark.parametrize("text", FILES)
def test_steps_and_version_policy_are_read(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.pbtxt"
    file.write_text(text, encoding="utf-8")
    assert config_in(file) == FILES[text]


@pytest.mark.parametrize(
    ("config", "loaded"),
    [
        (ModelConfig(), ("10",)),
        (ModelConfig(latest=2), ("10", "9")),
        (ModelConfig(latest=None), ("1", "10", "9")),
        (ModelConfig(specific=("9", "1", "7")), ("1", "9")),
    ],
)
def test_load_brings_the_versions_of_the_policy_that_are_there(
    tmp_path: Path, config: ModelConfig, loaded: tuple[str, ...]
) -> None:
    for name in ("1", "9", "10", "011", "0", "labels", "2.old"):
        (tmp_path / name).mkdir()
    (tmp_path / "12").touch()
    assert config.versions_in(tmp_path) == loaded


@pytest.mark.parametrize("text", ["a: [1", "a {", "a:", "step { b: { c: 1 }"])
def test_what_ends_in_the_middle_is_no_configuration(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.pbtxt"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="cannot be read"):
        config_in(file)
