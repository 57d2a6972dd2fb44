"""The units for systemd: its own tools accept them, and their settings are the service's.

Nothing is started here: `tests/deploy/test_under_systemd.py`, in `make evidence`, does that.
"""

import grp
import os
import pwd
import re
import shlex
from pathlib import Path

import pytest

from tests.architecture.test_pages import is_verb
from tests.deploy.programs import DEPLOY, output_of
from tests.deploy.settings_check import settings_from

FOLDER = DEPLOY / "systemd"
UNITS = sorted(unit.name for unit in FOLDER.glob("*.service"))
WHERE_RUNS_START = ["gpubroker-broker.service", "gpubroker-node.service", "gpubroker.service"]
STRICTEST = {"gpubroker-gateway.service": 2.0}
"""Below this is what `systemd-analyze security` calls OK."""


def values(unit: str, name: str) -> list[str]:
    text = (FOLDER / unit).read_text(encoding="utf-8")
    return re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a program that exists on this machine."""
    folder = tmp_path_factory.mktemp("units")
    for unit in UNITS:
        text = (FOLDER / unit).read_text(encoding="utf-8")
        (folder / unit).write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE))
    return folder


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_accepts_the_unit(copies: Path, unit: str) -> None:
    output_of("systemd-analyze", "verify", "--man=no", copies / unit)


@pytest.mark.parametrize("unit", STRICTEST)
def test_where_no_run_starts_the_unit_sees_little_of_the_machine(copies: Path, unit: str) -> None:
    told = output_of("systemd-analyze", "security", "--offline=true", "--no-pager", copies / unit)
    found = re.search(r"Overall exposure level.*: ([\d.]+)", told)
    assert found is not None, told
    assert float(found[1]) < STRICTEST[unit]


@pytest.mark.parametrize("unit", WHERE_RUNS_START)
def test_where_runs_start_nothing_is_hidden_that_they_need(unit: str) -> None:
    for hidden in ("PrivateDevices", "PrivateTmp", "MemoryDenyWriteExecute", "ProtectClock", "ProtectProc"):
        assert values(unit, hidden) == [], hidden
    assert values(unit, "OOMPolicy") == ["continue"]


@pytest.mark.parametrize("unit", ["gpubroker.service", "gpubroker-broker.service"])
def test_a_stop_leaves_ray_and_the_runs_alone(unit: str) -> None:
    assert values(unit, "KillMode") == ["process"]


@pytest.mark.parametrize("unit", [unit for unit in UNITS if unit != "gpubroker-node.service"])
def test_unit_sets_real_settings_and_may_stop_as_long_as_the_service_needs(unit: str) -> None:
    variables = dict(pair.split("=", 1) for line in values(unit, "Environment") for pair in shlex.split(line))
    settings = settings_from(variables)
    assert settings.data_dir == Path("/var/lib/gpubroker")
    [stop_seconds] = values(unit, "TimeoutStopSec")
    assert float(stop_seconds) > settings.drain_seconds
    [command] = values(unit, "ExecStart")
    program, *words = shlex.split(command)
    assert Path(program).name == "gpubroker"
    assert is_verb(words[:1])


def test_users_and_folders_are_made_as_the_units_need_them(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    output_of("systemd-sysusers", f"--root={tmp_path}", FOLDER / "sysusers.conf")
    assert "gpubroker:x:" in (tmp_path / "etc/passwd").read_text()
    user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(os.getegid()).gr_name
    mine = tmp_path / "tmpfiles.conf"
    text = (FOLDER / "tmpfiles.conf").read_text(encoding="utf-8")
    mine.write_text(
        text.replace("gpubroker gpubroker -", f"{user} {group} -").replace(
            "root gpubroker", f"{user} {group}"
        )
    )
    (tmp_path / "etc/passwd").write_text(f"{user}:x:{os.geteuid()}:{os.getegid()}::/:/bin/sh\n")
    (tmp_path / "etc/group").write_text(f"{group}:x:{os.getegid()}:\n")
    output_of("systemd-tmpfiles", f"--root={tmp_path}", "--create", mine)
    assert (tmp_path / "var/lib/gpubroker").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "etc/gpubroker").stat().st_mode & 0o777 == 0o750
