"""The parts of the service that do not answer."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from gpubroker_server.core.control.findings.finding import Finding, Severity

_WORKS = frozenset({"connected", "standby", "unknown"})
"""States of an executor of which nothing is wrong, as far as it is known."""


class ServerWay(NamedTuple):
    """One way to a model server."""

    server: str
    protocol: str
    fault: str
    is_only_way: bool
    """Requests cannot reach the server by another one."""


def unreachable_ray(executor: Mapping[str, Any]) -> Iterator[Finding]:
    """`executor`: as `Executor.status` says it."""
    state, address = str(executor.get("state", "unknown")), str(executor.get("address") or "")
    fault = str(executor.get("head_fault") or "")
    if fault or state not in _WORKS:
        yield Finding(
            "ray-unreachable",
            address or "ray",
            Severity.CRITICAL,
            f"Nothing starts: {fault or executor.get('message') or state}.",
            {"state": "no-head" if fault else state},
            "ray status --address " + address if address else "gpubroker stats; ray-head.log in data_dir",
        )


def unreachable_servers(ways: Iterable[ServerWay]) -> Iterator[Finding]:
    for way in ways:
        yield Finding(
            "model-server-unreachable",
            f"{way.server} ({way.protocol})",
            Severity.CRITICAL if way.is_only_way else Severity.WARNING,
            f"Model server {way.server} does not answer over {way.protocol}: {way.fault}.",
            {},
            "gpubroker stats; then look at the server's log and at triton.servers in the settings",
        )


def no_leader(has_leader: bool) -> Iterator[Finding]:
    if not has_leader:
        yield Finding(
            "no-leader",
            "leader",
            Severity.CRITICAL,
            "No process leads: nothing starts or stops.",
            {},
            "gpubroker broker, or gpubroker serve on a single machine",
        )


def unreachable_database(age_seconds: float, is_stale: bool) -> Iterator[Finding]:
    if is_stale:
        yield Finding(
            "database-unreachable",
            "database",
            Severity.CRITICAL,
            "The process has not heard from the database for too long; all that is said here is old.",
            {"age_seconds": round(age_seconds, 1)},
            "start the database, or correct database_url; /readyz says which part does not answer",
        )


def full_service_disk(disk_full: str) -> Iterator[Finding]:
    """Of the process that answers."""
    if disk_full:
        yield Finding(
            "service-disk-full",
            "service",
            Severity.CRITICAL,
            f"Nothing is accepted: {disk_full}.",
            {},
            "make room there: df -h",
        )
