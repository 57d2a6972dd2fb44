"""What `gpubroker doctor` says of the machine that it runs on."""

import pytest
from gpubroker_server.core.control.findings.finding import Severity
from gpubroker_server.core.control.findings.machine import (
    DiskRoom,
    MachineSeen,
    TakenPort,
    Unreached,
    about_machine,
    unreachable_service,
)

GIB = 2**30
ROOMY = DiskRoom("/data", 100 * GIB, 50 * GIB)
WELL = MachineSeen(
    open_files=4096, open_files_needed=3072, inotify_used=3, inotify_limit=128, shared_memory_mb=512,
    object_store_mb=128, ray_temp=ROOMY._replace(path="/tmp"), data_dir=ROOMY,
    private_files={"/data/client.json": 0o600}, versions={"gpubroker": "1", "gpubroker-server": "1"},
)  # fmt: skip


@pytest.mark.parametrize("seen", [WELL, MachineSeen(), WELL._replace(open_files=None, inotify_limit=0)])
def test_nothing_is_said_of_a_machine_that_is_fit_or_cannot_be_read(seen: MachineSeen) -> None:
    assert list(about_machine(seen)) == []


@pytest.mark.parametrize(
    ("changes", "kind", "subject", "said"),
    [
        ({"taken_ports": [TakenPort("port", 8470, "process 7, nginx")]}, "port-taken", "8470", "7, nginx"),
        ({"taken_ports": [TakenPort("port", 8470, "")]}, "port-taken", "8470", "another user"),
        (
            {"unreached": [Unreached("ray.address", "head:6379", "Connection refused")]},
            "address-unreachable", "head:6379", "(ray.address): Connection refused",
        ),
        ({"open_files": 1024}, "open-files-limit", "open files", "may open 1024 files"),
        ({"inotify_used": 120}, "inotify-limit", "inotify", "120 of 128"),
        ({"shared_memory_mb": 64}, "shared-memory-too-small", "/dev/shm", "64 MiB"),
        (
            {"ray_temp": ROOMY._replace(path="/scratch/of/a/team/with/a/long/name/here")},
            "ray-path-too-long", "/scratch/of/a/team/with/a/long/name/here", "more than 107",
        ),
        ({"ray_temp": DiskRoom("/tmp", 100 * GIB, GIB)}, "ray-disk-full", "/tmp", "1.0 GiB left"),
        ({"data_dir": DiskRoom("/data", 100 * GIB, GIB)}, "data-disk-full", "/data", "1.0 GiB left"),
        ({"data_dir_fault": "it is a file"}, "data-dir-unusable", "data_dir", "it is a file"),
        ({"private_files": {"/t": 0o644}}, "secret-readable", "/t", "mode 0644"),
        ({"versions": {"gpubroker": "1", "gpubroker-server": "2"}}, "releases-differ", "gpubroker", "1, 2"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_finding(changes: dict[str, object], kind: str, subject: str, said: str) -> None:
    [found] = about_machine(WELL._replace(**changes))  # type: ignore[arg-type]  # a field each
    assert (found.kind, found.subject) == (kind, subject)
    assert said in found.cause
    assert found.remedy


def test_the_newer_release_is_the_one_to_install() -> None:
    [found] = about_machine(WELL._replace(versions={"gpubroker": "0.10.0", "gpubroker-server": "0.9.0"}))
    assert found.remedy == "pip install 'gpubroker==0.10.0' 'gpubroker-server==0.10.0'"


def test_a_local_head_that_keeps_its_files_in_tmp_needs_room_there() -> None:
    """It does not look at RAY_TMPDIR."""
    [found] = about_machine(WELL._replace(ray_temp=DiskRoom("/tmp", 100 * GIB, GIB)))
    assert found.remedy.startswith("make room on /tmp; a Ray of your own")


@pytest.mark.parametrize(("has_started", "severity"), [(True, Severity.WARNING), (False, Severity.NOTE)])
def test_a_service_that_never_ran_here_is_not_missed(has_started: bool, severity: Severity) -> None:
    assert unreachable_service("no answer", has_started=has_started).severity is severity


def test_a_service_that_refuses_the_token_is_not_to_be_started() -> None:
    refused = unreachable_service("forbidden", has_started=True, is_refused=True)
    assert refused.remedy.startswith("GPUBROKER_TOKEN=")
