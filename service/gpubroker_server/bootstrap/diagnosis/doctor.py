"""`gpubroker doctor`: examines this machine for the needs of the settings, and asks the service if it
answers."""

import contextlib
import errno
import os
import resource
import shutil
import socket
from collections.abc import Iterator
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from gpubroker.cli.lookup import connect
from gpubroker.errors import BrokerError
from gpubroker.transport.decoding import decode
from gpubroker.wire.fleet import Diagnosis
from gpubroker.wire.fleet import Finding as FoundByDoctor

from gpubroker_server.adapters.ray.head.raylet import raylet_socket
from gpubroker_server.adapters.sql.postgres import server_addresses
from gpubroker_server.adapters.sql.session import DatabaseRefused
from gpubroker_server.bootstrap.diagnosis.health import health_at
from gpubroker_server.bootstrap.start_checks import OTHER_FILES, port_owner
from gpubroker_server.core.control.findings.finding import Finding, Severity
from gpubroker_server.core.control.findings.machine import (
    SHARED_MEMORY,
    DiskRoom,
    MachineSeen,
    TakenPort,
    Unreached,
    about_machine,
    unreachable_service,
)
from gpubroker_server.settings.loading import Settings

CONNECT_SECONDS = 2.0
_LOCAL_RAY_TEMP = Path("/tmp")  # noqa: S108  # see the supervisor of a local head
_INOTIFY_LIMIT = Path("/proc/sys/fs/inotify/max_user_instances")
_PACKAGES = ("gpubroker", "gpubroker-server", "ray")


def findings_for(settings: Settings) -> list[FoundByDoctor]:
    """Return the findings about this machine and, if it answers, the service, the worst first."""
    machine = list(about_machine(look_at_machine(settings)))
    # The SDK finds the service by the data directory of these settings.
    os.environ.setdefault("GPUBROKER_DATA_DIR", str(settings.data_dir))
    try:
        with connect() as broker:
            fleet = list(broker.diagnostics().items)
    except BrokerError as error:
        fleet, has_started = [], (settings.data_dir / "client.json").exists()
        is_refused = error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
        machine.append(unreachable_service(str(error), has_started=has_started, is_refused=is_refused))
    findings = [*map(_told, machine), *fleet]
    order = [severity.value for severity in Severity]
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def _told(finding: Finding) -> FoundByDoctor:
    """Return a finding about this machine in the form of the service's findings. It has no time since when
    it holds."""
    fields = {name: getattr(finding, name) for name in Diagnosis.__struct_fields__}
    return decode(FoundByDoctor, {**fields, "evidence": dict(finding.evidence)})


def look_at_machine(settings: Settings) -> MachineSeen:
    """Return the facts about this machine. This changes nothing, and takes at most a few seconds for each
    address that does not answer."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    runs_ray = settings.engine == "ray"
    has_local_ray = runs_ray and not settings.ray.address
    used, limit = _inotify()
    return MachineSeen(
        taken_ports=tuple(_taken_ports(settings)),
        unreached=tuple(_unreached(settings)),
        open_files=None if hard == resource.RLIM_INFINITY else hard,
        open_files_needed=settings.limits.connections + OTHER_FILES,
        inotify_used=used,
        inotify_limit=limit,
        shared_memory_mb=_size_mb(Path(SHARED_MEMORY)) if has_local_ray else None,
        object_store_mb=settings.ray.object_store_mb,
        ray_temp=_place(_LOCAL_RAY_TEMP if has_local_ray else raylet_socket().parents[3])
        if runs_ray
        else None,
        data_dir=_place(settings.data_dir),
        data_dir_fault=_fault_of(settings.data_dir),
        private_files=dict(_modes(settings)),
        versions=dict(_versions()),
    )


def _taken_ports(settings: Settings) -> Iterator[TakenPort]:
    """Yield the configured ports that programs other than gpubroker have taken."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    for setting, port in (("port", settings.port), ("triton.grpc_port", settings.triton.grpc_port)):
        # If the service answers, its own ports are taken by itself.
        if (
            port
            and _is_taken(settings.host, port)
            and not health_at(f"http://{host}:{settings.port}").is_alive
        ):
            yield TakenPort(setting, port, port_owner(port))


def _is_taken(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
            tried.listen()
        except OSError as fault:
            return fault.errno == errno.EADDRINUSE
    return False


def _unreached(settings: Settings) -> Iterator[Unreached]:
    addresses = list(_addresses(settings))
    if settings.database.startswith("postgresql"):
        try:
            addresses += [("database_url", *address) for address in server_addresses(settings.database)]
        except DatabaseRefused as refused:
            yield Unreached("database_url", "PostgreSQL", str(refused))
    for setting, host, port in addresses:
        try:
            socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
        except OSError as fault:
            yield Unreached(setting, f"{host}:{port}", fault.strerror or str(fault))
        except UnicodeError:
            yield Unreached(setting, f"{host}:{port}", "it is not a host name")


def _addresses(settings: Settings) -> Iterator[tuple[str, str, int]]:
    """Yield the setting, the host and the port of each address to which the service connects, besides the
    database."""
    if settings.engine == "ray" and settings.ray.address:
        host, _, port = settings.ray.address.rpartition(":")
        yield "ray.address", host.strip("[]"), int(port)
    for server in settings.triton.servers:
        for url in (server.http_url, server.grpc_url):
            parts = urlsplit(url or "")
            if parts.hostname and parts.port:
                yield f"triton.servers.{server.name}", parts.hostname, parts.port


def _inotify() -> tuple[int, int]:
    """Return the number of this user's inotify instances, and the most that it may have; 0 if unknown."""
    used = 0
    for process in psutil.process_iter(["uids"]):
        uids = process.info["uids"]
        if uids is not None and uids.real == os.getuid():
            with contextlib.suppress(OSError):
                files = Path(f"/proc/{process.pid}/fd").iterdir()
                used += sum(_target(file) == "anon_inode:inotify" for file in files)
    try:
        return used, int(_INOTIFY_LIMIT.read_text())
    except (OSError, ValueError):
        return used, 0


def _target(file: Path) -> str:
    try:
        return os.readlink(file)
    except OSError:
        return ""


def _place(path: Path) -> DiskRoom | None:
    """Return the total and the free bytes of a path's file system; None if the path does not exist."""
    try:
        use = shutil.disk_usage(path)
    except OSError:
        return None
    return DiskRoom(str(path), use.total, use.free)


def _size_mb(path: Path) -> int | None:
    place = _place(path)
    return None if place is None else place.total_bytes // 2**20


def _fault_of(data_dir: Path) -> str:
    """Return why the data directory cannot be used; empty if it can, or if the first start will make it."""
    if not data_dir.exists():
        return ""
    if not data_dir.is_dir():
        return f"{data_dir} is not a directory"
    may_use = os.access(data_dir, os.R_OK | os.W_OK | os.X_OK)
    return "" if may_use else f"this user (uid {os.getuid()}) may not write to {data_dir}"


def _modes(settings: Settings) -> Iterator[tuple[str, int]]:
    for path in (settings.data_dir / "client.json", settings.ray.token_file):
        with contextlib.suppress(OSError):
            if path is not None:
                yield str(path), path.stat().st_mode & 0o777


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            yield package, version(package)
