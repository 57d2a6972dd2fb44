"""Reads the parts of a model's `config.pbtxt` that matter before a load: the steps of an ensemble, the
versions, and whether the model runs on CPUs alone."""

import re
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from msgspec import Struct

from gpubroker_server.ports.triton_messages import messages

_KIND_CPU = 2

_VERSION = re.compile("[1-9][0-9]*")
"""The name of a folder that Triton takes for a version."""

_BEFORE_LIST = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\#[^\n]*)|(\w)\s*\[""")
"""Matches a string, a comment, or the last letter of a field's name before a list."""


class ModelConfig(Struct, frozen=True):
    steps: tuple[str, ...] = ()
    """The models of an ensemble, each of them once."""
    latest: int | None = 1
    """The number of highest versions that are loaded; None for all versions."""
    specific: tuple[str, ...] = ()
    """The versions that are loaded instead, if there are any."""
    on_cpu: bool = False
    """True if all instances of the model are on CPUs (`KIND_CPU`), so that it takes no GPU memory."""

    def versions_in(self, folder: Path) -> tuple[str, ...]:
        """Return the versions in the model's folder that a load would load, sorted as in an index. Raises
        OSError."""
        versions = [
            entry.name for entry in folder.iterdir() if entry.is_dir() and _VERSION.fullmatch(entry.name)
        ]
        if self.specific:
            return tuple(sorted(set(self.specific) & set(versions)))
        highest_first = sorted(versions, key=int, reverse=True)
        return tuple(sorted(highest_first[: self.latest]))


def config_of(config: Any) -> ModelConfig:
    """Return the parts of a ModelConfig message that the broker uses."""
    policy = config.version_policy
    return ModelConfig(
        steps=tuple(dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step)),
        latest=None if policy.HasField("all") else policy.latest.num_versions or 1,
        specific=tuple(str(version) for version in policy.specific.versions),
        on_cpu=bool(config.instance_group)
        and all(group.kind == _KIND_CPU for group in config.instance_group),
    )


def config_in(file: Path) -> ModelConfig:
    """Return the configuration in a `config.pbtxt`, which the server may complete. Raises OSError and
    ValueError."""
    # The library skips an unknown list of messages only with a colon before it, which a file need not have.
    text = _BEFORE_LIST.sub(lambda found: found[1] or f"{found[2]}: [", file.read_text(encoding="utf-8"))
    try:
        return config_of(text_format.Parse(text, messages.ModelConfig(), allow_unknown_field=True))
    except text_format.ParseError as fault:
        raise ValueError(f"{file} cannot be read: {fault}") from None
