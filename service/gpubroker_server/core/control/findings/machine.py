"""Find faults of the machine on which `gpubroker doctor` runs, with or without a service."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gpubroker_server.core.control.findings.finding import Finding, Severity, critical, warning
from gpubroker_server.core.domain.units import in_gib

SHARED_MEMORY = "/dev/shm"  # noqa: S108  # the name of a file system
SOCKET_PATH_BYTES = 107
"""The most bytes of the path of a Unix socket in Linux."""
RAY_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
FREE_BYTES = 2 * 2**30
FREE_SHARE = 0.05
"""Ray's own threshold for a full disk."""
INOTIFY_SHARE = 0.9


class TakenPort(NamedTuple):
    setting: str
    port: int
    holder: str
    """The process that listens on the port; empty if this user may not see it."""


class Unreached(NamedTuple):
    """An address of the settings that this machine cannot connect to."""

    setting: str
    address: str
    fault: str


class DiskRoom(NamedTuple):
    """The room in the file system of a directory."""

    path: str
    total_bytes: int
    free_bytes: int


class MachineSeen(NamedTuple):
    """Facts that were read from a machine. A fact that could not be read has its default, from which no
    finding follows."""

    taken_ports: Sequence[TakenPort] = ()
    unreached: Sequence[Unreached] = ()
    open_files: int | None = None
    """The hard limit of open files; None if there is none."""
    open_files_needed: int = 0
    inotify_used: int = 0
    """The number of inotify instances of this user."""
    inotify_limit: int = 0
    """The limit of inotify instances per user; 0 if it is unknown."""
    shared_memory_mb: int | None = None
    """The size of /dev/shm; None if it does not exist or is not needed."""
    object_store_mb: int = 0
    """The part of the shared memory that Ray's object store takes."""
    ray_temp: DiskRoom | None = None
    """The disk on which Ray keeps its sessions."""
    data_dir: DiskRoom | None = None
    """The disk of the data directory; None if the directory does not exist yet."""
    data_dir_fault: str = ""
    private_files: Mapping[str, int] = {}
    """Path of each file with secrets -> its mode."""
    versions: Mapping[str, str] = {}
    """Installed package -> its version."""


def about_machine(seen: MachineSeen) -> Iterator[Finding]:
    yield from _ports(seen)
    yield from _limits(seen)
    yield from _shared_memory(seen)
    yield from _ray_temp(seen.ray_temp)
    yield from _data_dir(seen)
    yield from _versions(seen.versions)


def _ports(seen: MachineSeen) -> Iterator[Finding]:
    for setting, port, holder in seen.taken_ports:
        cause = f"Port {port} ({setting}) is taken by {holder or 'a process of another user'}."
        remedy = f"stop that process (ss -ltnp 'sport = :{port}'), or choose another {setting}"
        yield critical("port-taken", str(port), cause, remedy)
    for setting, address, fault in seen.unreached:
        cause = f"This machine cannot connect to {address} ({setting}): {fault}."
        remedy = f"start what should listen there, open the firewall for {address}, or correct {setting}"
        yield critical("address-unreachable", address, cause, remedy)


def _limits(seen: MachineSeen) -> Iterator[Finding]:
    if seen.open_files is not None and seen.open_files < seen.open_files_needed:
        cause = (
            f"A process may open {seen.open_files} files; with these settings the service needs "
            f"{seen.open_files_needed}."
        )
        evidence = {"limit": seen.open_files, "needed": seen.open_files_needed}
        remedy = f"ulimit -Hn {seen.open_files_needed} (LimitNOFILE of a unit), or lower limits.connections"
        yield warning("open-files-limit", "open files", cause, remedy, evidence)
    if seen.inotify_limit and seen.inotify_used >= INOTIFY_SHARE * seen.inotify_limit:
        cause = f"This user has {seen.inotify_used} of {seen.inotify_limit} inotify instances."
        evidence = {"used": seen.inotify_used, "limit": seen.inotify_limit}
        remedy = f"sysctl fs.inotify.max_user_instances={4 * seen.inotify_limit}"
        yield warning("inotify-limit", "inotify", cause, remedy, evidence)


def _shared_memory(seen: MachineSeen) -> Iterator[Finding]:
    size_mb, needed_mb = seen.shared_memory_mb, seen.object_store_mb
    if size_mb is not None and size_mb < needed_mb:
        cause = (
            f"{SHARED_MEMORY} has {size_mb} MiB, Ray's object store takes {needed_mb}: it would be on disk."
        )
        remedy = f"docker run --shm-size={2 * needed_mb}m, or a memory-backed emptyDir at {SHARED_MEMORY}"
        evidence = {"size_mb": size_mb, "needed_mb": needed_mb}
        yield warning("shared-memory-too-small", SHARED_MEMORY, cause, remedy, evidence)


def _ray_temp(place: DiskRoom | None) -> Iterator[Finding]:
    if place is None:
        return
    length = len(place.path.rstrip("/") + RAY_SOCKET)
    if length > SOCKET_PATH_BYTES:
        cause = (
            f"Paths of Ray's sockets below {place.path} have {length} bytes, more than {SOCKET_PATH_BYTES}."
        )
        yield critical("ray-path-too-long", place.path, cause, "export RAY_TMPDIR=/tmp")
    yield from _room(
        "ray-disk-full",
        place,
        f"make room on {place.path}; a Ray of your own may keep it elsewhere: RAY_TMPDIR",
    )


def _data_dir(seen: MachineSeen) -> Iterator[Finding]:
    if seen.data_dir_fault:
        cause = f"The data directory cannot be used: {seen.data_dir_fault}."
        remedy = "give it to the user of the service: chown -R USER, chmod 700"
        yield critical("data-dir-unusable", "data_dir", cause, remedy)
    if seen.data_dir is not None:
        yield from _room("data-disk-full", seen.data_dir, f"du -xh {seen.data_dir.path} | sort -h | tail")
    for path, mode in seen.private_files.items():
        if mode & 0o077:
            cause = f"Others may read {path}, which has a secret (mode {mode:04o})."
            yield critical("secret-readable", path, cause, f"chmod 600 {path}, then replace the token in it")


def _room(kind: str, place: DiskRoom, remedy: str) -> Iterator[Finding]:
    least = min(FREE_BYTES, FREE_SHARE * place.total_bytes)
    if place.free_bytes < least:
        cause = f"The disk of {place.path} has {in_gib(place.free_bytes // 2**20)} left."
        yield warning(kind, place.path, cause, remedy, {"free_bytes": place.free_bytes})


def _versions(versions: Mapping[str, str]) -> Iterator[Finding]:
    own_versions = {versions[name] for name in ("gpubroker", "gpubroker-server") if name in versions}
    if len(own_versions) > 1:
        cause = (
            f"gpubroker and gpubroker-server are of different releases: {', '.join(sorted(own_versions))}."
        )
        newest = max(own_versions, key=lambda version: [int(part) for part in re.findall(r"\d+", version)])
        remedy = f"pip install 'gpubroker=={newest}' 'gpubroker-server=={newest}'"
        yield warning("releases-differ", "gpubroker", cause, remedy, dict(versions))


def unreachable_service(fault: str, *, has_started: bool, is_refused: bool = False) -> Finding:
    """Return the finding that the service was not reached. `has_started` is True if a service has already
    used the data directory in this machine's settings; `is_refused` is True if the service refuses this
    caller."""
    severity = Severity.WARNING if has_started else Severity.NOTE
    cause = f"Only this machine was looked at, not the fleet: {fault}."
    remedy = "GPUBROKER_TOKEN=TOKEN_WITH_CLUSTER_READ gpubroker doctor" if is_refused else "gpubroker serve"
    return Finding("service-unreachable", "service", severity, cause, {}, remedy)
