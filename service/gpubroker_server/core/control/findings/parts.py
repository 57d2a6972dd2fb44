"""Find parts of the service that do not answer or do not work."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from gpubroker_server.core.control.findings.finding import Finding, critical, warning
from gpubroker_server.core.control.log_growth import LogGrowth
from gpubroker_server.core.domain.units import MIB_BYTES, Instant, in_gib

_FAULTLESS_STATES = frozenset({"connected", "standby", "unknown"})
"""The states of an executor in which no fault of it is known."""


class ServerWay(NamedTuple):
    """A protocol over which the service cannot use a model server, with the reason."""

    server: str
    protocol: str
    fault: str
    is_only_way: bool
    """True if requests cannot reach the server over another protocol."""
    since: Instant | None = None


def unreachable_ray(executor: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding if the service cannot reach Ray. `executor` is the mapping that `Executor.status`
    returns."""
    state, address = str(executor.get("state", "unknown")), str(executor.get("address") or "")
    fault = str(executor.get("head_fault") or "")
    if fault or state not in _FAULTLESS_STATES:
        cause = f"Nothing starts: {fault or executor.get('message') or state}."
        remedy = "ray status --address " + address if address else "gpubroker stats; ray-head.log in data_dir"
        evidence = {"state": "no-head" if fault else state}
        yield critical("ray-unreachable", address or "ray", cause, remedy, evidence)


def unreachable_servers(ways: Iterable[ServerWay]) -> Iterator[Finding]:
    for way in ways:
        cause = f"Model server {way.server} does not answer over {way.protocol}: {way.fault}."
        remedy = "gpubroker stats; then look at the server's log and at triton.servers in the settings"
        make_finding = critical if way.is_only_way else warning
        finding = make_finding("model-server-unreachable", f"{way.server} ({way.protocol})", cause, remedy)
        yield replace(finding, first_seen=way.since)


def misplaced_servers(faults: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for each server without a place for its models. `faults` has the reason for each."""
    for server, fault in sorted(faults.items()):
        cause = f"Model server {server} can load nothing: {fault}."
        remedy = "correct node and devices of that server in triton.servers, and start the service again"
        yield critical("model-server-misplaced", server, cause, remedy)


def unauthorized_servers(ways: Iterable[ServerWay]) -> Iterator[Finding]:
    """Yield a finding for each server that refuses the service's own credentials. `ServerWay.fault` is the
    server's refusal."""
    for way in ways:
        cause = f"Model server {way.server} refuses the service itself over {way.protocol}: {way.fault}."
        remedy = "set token_file or headers of that server in triton.servers, and start the service again"
        yield critical("model-server-unauthorized", f"{way.server} ({way.protocol})", cause, remedy)


def no_leader(has_leader: bool, led_until: Instant | None) -> Iterator[Finding]:
    if not has_leader:
        cause = "No process leads: nothing starts or stops."
        remedy = "gpubroker broker, or gpubroker serve on a single machine"
        yield replace(critical("no-leader", "leader", cause, remedy), first_seen=led_until)


def unreachable_database(age_seconds: float, is_stale: bool, now: Instant) -> Iterator[Finding]:
    if is_stale:
        cause = "This process has not heard from the database for too long; all that it reports is old."
        remedy = "start the database, or correct database_url; /readyz says which part does not answer"
        evidence = {"age_seconds": round(age_seconds, 1)}
        finding = critical("database-unreachable", "database", cause, remedy, evidence)
        yield replace(finding, first_seen=Instant(now - age_seconds))


def full_service_disk(fault: str) -> Iterator[Finding]:
    """Yield a finding if a disk of the process that answers is full. `fault` says which disk; it is empty if
    none is full."""
    if fault:
        cause = f"Nothing is accepted: {fault}."
        remedy = "make room there: df -h"
        yield critical("service-disk-full", "service", cause, remedy)


def growing_database_log(log: LogGrowth | None, now: Instant) -> Iterator[Finding]:
    if log is not None and log.is_too_much(now):
        size, grown = (in_gib(count // MIB_BYTES) for count in (log.size_bytes, log.grown_bytes))
        cause = (
            f"The write-ahead log of the database has {size}, {grown} more than when it was last shortened: "
            "something keeps the database from shortening it."
        )
        remedy = (
            "SQLite: end what reads the file (lsof on it, such as a backup that hangs). PostgreSQL: SELECT "
            "slot_name, active FROM pg_replication_slots, and drop the slot that nothing reads"
        )
        evidence = {"size_bytes": log.size_bytes, "grown_bytes": log.grown_bytes}
        finding = warning("database-log-grows", "database", cause, remedy, evidence)
        yield replace(finding, first_seen=log.since)
