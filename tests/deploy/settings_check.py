"""Whether the settings that a file of deploy/ gives are settings of the service."""

import os
from collections.abc import Mapping
from unittest.mock import patch

from gpubroker_server.settings.loading import Settings, load_settings, settings_model
from pydantic import BaseModel

PREFIX = "GPUBROKER_"


def settings_from(variables: Mapping[str, str]) -> Settings:
    """As a process reads them that has these variables. Fails if one names no setting."""
    unknown = [name for name in variables if name.startswith(PREFIX) and not _is_setting(name)]
    assert unknown == [], "there are no such settings"
    with patch.dict(os.environ, dict(variables), clear=True):
        return load_settings()


def _is_setting(variable: str) -> bool:
    section = settings_model()
    if variable == "GPUBROKER_CONFIG":
        return True
    *sections, name = variable.removeprefix(PREFIX).lower().split("__")
    for part in sections:
        found = section.model_fields[part].annotation if part in section.model_fields else None
        if not (isinstance(found, type) and issubclass(found, BaseModel)):
            return False
        section = found
    return name in section.model_fields
