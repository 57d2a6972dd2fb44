"""A service whose user has neither a name nor a home."""

import pwd
from pathlib import Path
from typing import NoReturn

import pytest
from gpubroker_server.bootstrap.process import greeting
from gpubroker_server.settings.loading import SettingsRefused, load_settings


@pytest.fixture(autouse=True)
def _nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for variable in ("HOME", "LOGNAME", "USER", "XDG_STATE_HOME", "GPUBROKER_DATA_DIR"):
        monkeypatch.delenv(variable, raising=False)


def test_a_named_data_directory_is_enough_for_a_start(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path)
    said = greeting(settings, "http://127.0.0.1:1")
    assert f"  clients find it with: export GPUBROKER_DATA_DIR={tmp_path}" in said


def test_without_a_data_directory_the_start_says_what_to_name() -> None:
    with pytest.raises(SettingsRefused, match="has no home directory to keep data in; name a directory"):
        load_settings()


def test_a_path_in_an_unknown_home_is_refused_with_its_setting() -> None:
    with pytest.raises(SettingsRefused, match="~/data begins in a home directory"):
        load_settings(data_dir=Path("~/data"))
