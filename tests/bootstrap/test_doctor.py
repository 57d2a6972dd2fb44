"""`gpubroker doctor` on this machine: each fault is a real one, and nothing is changed."""

import ctypes
import json
import math
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer
from typing import Any

import pytest
from gpubroker_server.bootstrap.diagnosis.doctor import look_at_machine
from gpubroker_server.core.control.findings.machine import INOTIFY_SHARE, MachineSeen, about_machine
from gpubroker_server.settings.loading import load_settings

from tests.chaos.forked import ForkedService
from tests.e2e.service_process import ROOT, environment, until
from tests.mounts import mounted
from tests.patience import PATIENCE_SECONDS


def seen(data_dir: Path, **settings: Any) -> MachineSeen:
    return look_at_machine(load_settings(None, data_dir=data_dir, **{"port": 0, **settings}))


def kinds(data_dir: Path, **settings: Any) -> dict[str, str]:
    """Kind -> cause."""
    return {one.kind: one.cause for one in about_machine(seen(data_dir, **settings))}


def doctor(*words: str, **variables: str) -> tuple[int, list[Mapping[str, Any]]]:
    told = subprocess.run(
        [sys.executable, "-m", "gpubroker_server", "doctor", "-o", "json", *words],
        capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd=ROOT, env=environment(**variables),
    )  # fmt: skip
    assert told.stderr == ""
    return told.returncode, json.loads(told.stdout)


@pytest.fixture
def taken_port() -> Iterator[int]:
    """By a program that closes each connection at once."""
    with TCPServer(("127.0.0.1", 0), BaseRequestHandler) as other:
        serving = threading.Thread(target=other.serve_forever, args=(0.01,))
        serving.start()
        yield int(other.server_address[1])
        other.shutdown()
        serving.join()


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as other:
        return int(other.getsockname()[1])


@pytest.mark.provokes("port-taken")
def test_a_port_that_another_program_has_is_named_with_that_program(tmp_path: Path, taken_port: int) -> None:
    assert f"process {os.getpid()}, " in kinds(tmp_path, port=taken_port)["port-taken"]


def test_an_address_that_is_not_of_this_machine_is_not_taken_by_anybody(
    tmp_path: Path, closed_port: int
) -> None:
    assert not seen(tmp_path, host="192.0.2.1", port=closed_port).taken_ports


@pytest.mark.provokes("address-unreachable")
def test_addresses_that_do_not_answer_are_named_with_their_setting(tmp_path: Path, closed_port: int) -> None:
    server = {"name": "here", "http_url": f"http://127.0.0.1:{closed_port}"}
    found = seen(
        tmp_path,
        database_url=f"postgresql://gpubroker@127.0.0.1:{closed_port}/gpubroker",
        ray={"address": f"127.0.0.1:{closed_port}"},
        triton={"servers": [server]},
    ).unreached
    assert [one.setting for one in found] == ["ray.address", "triton.servers.here", "database_url"]
    assert {one.address for one in found} == {f"127.0.0.1:{closed_port}"}


@pytest.mark.parametrize(
    ("at", "unreached"),
    [
        ("u:p@127.0.0.1:{port},[::1]:{port}/db", ["127.0.0.1:{port}", "::1:{port}"]),
        ("127.0.0.1,localhost/db?port={port}", ["127.0.0.1:{port}", "localhost:{port}"]),
        ("u:p@a..b/db", ["a..b:5432"]),
        ("127.0.0.1:many/db", ["PostgreSQL"]),
        ("u:p%zz@127.0.0.1/db", ["PostgreSQL"]),
        ("u@/db?host=/tmp", []),
    ],
)
def test_each_host_of_the_database_is_tried_and_an_unknown_name_is_told(
    tmp_path: Path, closed_port: int, at: str, unreached: list[str]
) -> None:
    found = seen(tmp_path, database_url=f"postgresql://{at.format(port=closed_port)}").unreached
    assert [one.address for one in found] == [one.format(port=closed_port) for one in unreached]


@pytest.mark.provokes("data-dir-unusable")
def test_a_data_directory_that_is_a_file_cannot_be_used(tmp_path: Path) -> None:
    place = tmp_path / "data"
    place.write_text("")
    assert "is not a directory" in kinds(place)["data-dir-unusable"]
    assert not kinds(tmp_path / "not-yet").keys() & {"data-dir-unusable", "data-disk-full"}
    assert not (tmp_path / "not-yet").exists()


@pytest.mark.provokes("secret-readable")
def test_a_token_that_others_may_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "client.json").write_text("{}")
    (tmp_path / "client.json").chmod(0o644)
    assert str(tmp_path / "client.json") in kinds(tmp_path)["secret-readable"]


@pytest.mark.provokes("open-files-limit")
def test_too_few_open_files_are_counted_against_what_the_settings_need(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert hard != resource.RLIM_INFINITY
    assert "open-files-limit" in kinds(tmp_path, limits={"connections": hard})


@pytest.mark.provokes("shared-memory-too-small")
def test_an_object_store_that_is_larger_than_the_shared_memory_is_found(tmp_path: Path) -> None:
    assert seen(tmp_path).shared_memory_mb
    assert "shared-memory-too-small" in kinds(tmp_path, ray={"object_store_mb": 2**30})


@pytest.mark.provokes("inotify-limit")
def test_a_user_who_has_taken_nearly_all_inotify_instances_is_told(tmp_path: Path) -> None:
    """A tenth is left for other programs."""
    before = seen(tmp_path)
    libc, wanted = ctypes.CDLL(None, use_errno=True), math.ceil(INOTIFY_SHARE * before.inotify_limit)
    with ExitStack() as stack:
        for _ in range(wanted - before.inotify_used):
            taken = libc.inotify_init1(os.O_CLOEXEC)
            assert taken >= 0, os.strerror(ctypes.get_errno())
            stack.callback(os.close, taken)
        assert f"of {before.inotify_limit} inotify instances" in kinds(tmp_path)["inotify-limit"]


@pytest.mark.provokes("releases-differ")
def test_packages_of_two_releases_are_found(tmp_path: Path) -> None:
    about = tmp_path / "other" / "gpubroker-99.0.0.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text("Metadata-Version: 2.1\nName: gpubroker\nVersion: 99.0.0\n")
    path = os.pathsep.join((str(tmp_path / "other"), os.environ.get("PYTHONPATH", "")))
    _, found = doctor("--data-dir", str(tmp_path / "data"), GPUBROKER_PORT="0", PYTHONPATH=path)
    [one] = [one for one in found if one["kind"] == "releases-differ"]
    assert one["evidence"]["gpubroker"] == "99.0.0"


@pytest.mark.evidence
@pytest.mark.provokes("ray-disk-full", "data-disk-full")
def test_disks_without_room_for_ray_and_for_the_data_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    with mounted(disk, "-t", "tmpfs", "-o", "size=8m", "none"):
        monkeypatch.setenv("RAY_TMPDIR", str(disk))
        ray = {"address": "127.0.0.1:1"}
        assert not kinds(disk, ray=ray).keys() & {"ray-disk-full", "data-disk-full"}
        (disk / "filler").write_bytes(bytes(8_200_000))
        assert kinds(disk, ray=ray).keys() >= {"ray-disk-full", "data-disk-full"}


@pytest.mark.provokes("ray-path-too-long")
def test_a_long_path_of_rays_sockets_is_found_before_ray_fails_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("a" * 60)
    long.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    assert "ray-path-too-long" in kinds(tmp_path, ray={"address": "127.0.0.1:1"})


@pytest.mark.provokes("service-unreachable")
def test_doctor_works_without_a_service_and_exits_1_on_critical_findings(
    tmp_path: Path, taken_port: int
) -> None:
    code, found = doctor("--data-dir", str(tmp_path), GPUBROKER_PORT="0")
    assert code == 0
    assert "service-unreachable" in {one["kind"] for one in found}
    code, found = doctor("--data-dir", str(tmp_path), GPUBROKER_PORT=str(taken_port))
    assert (code, found[0]["kind"], found[0]["severity"]) == (1, "port-taken", "critical")


@pytest.mark.provokes("model-server-unreachable")
def test_with_a_service_it_says_what_that_finds_as_well(tmp_path: Path, closed_port: int) -> None:
    server = {"name": "here", "http_url": f"http://127.0.0.1:{closed_port}"}
    triton = {"servers": [server]}
    with ForkedService(tmp_path / "data", engine="simulated", triton=triton) as running:
        with running.broker as broker:
            until(lambda: broker.diagnostics().items, "the server has not answered")
        port = running.url.rpartition(":")[2]
        code, found = doctor("--data-dir", str(running.data_dir), GPUBROKER_PORT=port)
        assert code == 1
        assert {one["kind"] for one in found} == {"model-server-unreachable"}
        assert (found[0]["subject"], found[0]["severity"]) == ("here (http)", "critical")
        own = {"GPUBROKER_PORT": port, "GPUBROKER_TOKEN": "not-one"}
        code, [refused] = doctor("--data-dir", str(running.data_dir), **own)
        assert (code, refused["kind"]) == (0, "service-unreachable")
        assert refused["remedy"].startswith("GPUBROKER_TOKEN=")
