"""Operations on leases: ask for one, renew it, release it, and the steps that hold a lease while a program
runs."""

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, Unpack

from gpubroker.errors import BrokerError, Refused
from gpubroker.leases.lease import AnyLease, LeaseEnded, LeaseOptions, LeaseStatus
from gpubroker.transport.decoding import decode
from gpubroker.transport.exchange import Call, Pause, Steps
from gpubroker.transport.operations import Operations, Pages, json_body, listing, operation, path_part
from gpubroker.user_places import user_name
from gpubroker.wire.leases import Lease, LeaseState

_PAUSE_SECONDS = 1.0
_FINAL_CODES = frozenset({"unauthenticated", "forbidden", "not-found", "closed"})
"""The problem codes after which this program can never renew. A proxy's 4xx has no code."""


class LeaseSteps(Operations):
    """Ask for a lease, hold it and release it, as steps for `LeaseApi` and for held leases."""

    def _new_lease(self, options: LeaseOptions) -> Steps[Lease]:
        body: dict[str, Any] = {**options}
        if "holder" not in body:
            body["holder"] = _this_program()
        key = body.pop("idempotency_key", None)
        return decode(Lease, (yield from self._make("/leases", key, json_body(body))))

    def _renewed(self, lease: AnyLease, ttl_seconds: float | None = None) -> Steps[Lease]:
        body = {} if ttl_seconds is None else {"ttl_seconds": ttl_seconds}
        return decode(Lease, (yield from self._ask("POST", f"{_path(lease)}/renew", body)))

    def _released(self, lease: AnyLease) -> Steps[Lease]:
        return decode(Lease, (yield from self._ask("DELETE", _path(lease))))

    def _acquire(self, lease: Lease, timeout_seconds: float | None) -> Steps[Lease]:
        """Renew a pending lease until it is held. Raises LeaseEnded if it is not held in time."""
        began = time.monotonic()
        while lease.state is LeaseState.PENDING:
            left = lease.interval_seconds
            if timeout_seconds is not None:
                left = min(left, timeout_seconds - (time.monotonic() - began))
            if left <= 0:
                cause = "" if lease.pending is None else f": {lease.pending.message}"
                raise LeaseEnded(lease.id, f"no memory was given within {timeout_seconds:g} s{cause}")
            lease = yield from self._wait_while(lease, LeaseState.PENDING, left)
            if lease.state is LeaseState.PENDING:
                yield from self._renewed(lease)
        if lease.state is not LeaseState.HELD:
            cause = f": {lease.error.message}" if lease.error else ""
            raise LeaseEnded(lease.id, f"lease {lease.id} is {lease.raw.get('state')}{cause}")
        return lease

    def _keep(self, status: LeaseStatus) -> Steps[None]:
        """Renew a held lease until its holder has left or has to leave."""
        while not status.is_over and status.notice is None:
            try:
                status.update((yield from self._renewed_in_time(status)))
            except BrokerError as fault:
                if fault.code in _FINAL_CODES:
                    status.refuse(fault)
                else:
                    status.is_unreachable = True
                    yield Pause(_PAUSE_SECONDS)

    def _renewed_in_time(self, status: LeaseStatus) -> Steps[Lease]:
        """Renew the lease after a fraction of its TTL and return it. If the lease is no longer held, return
        at once."""
        lease = yield from self._wait_while(status.lease, LeaseState.HELD, status.lease.interval_seconds)
        if lease.state is not LeaseState.HELD or status.is_over:
            return lease
        try:
            return (yield from self._renewed(lease))
        except Refused as refused:
            if refused.code not in ("lease-ended", "lease-under-notice"):
                raise
        return decode(Lease, (yield from self._ask("GET", _path(lease))))

    def _wait_while(self, lease: Lease, state: LeaseState, seconds: float) -> Steps[Lease]:
        """Return the lease when it has left the state, or after this many seconds.

        A service that is stopping, or a proxy that cuts long answers short, answers early without news; then
        the next request is delayed.
        """
        began = time.monotonic()
        params = {"state": state.value, "timeout_seconds": round(max(0.0, seconds), 3)}
        call = Call("GET", f"{_path(lease)}/wait", params=params, patience_seconds=seconds)
        lease = decode(Lease, (yield from self._send(call)).json())
        left = seconds - (time.monotonic() - began)
        if lease.state is state and left > seconds / 2:
            yield Pause(min(left, _PAUSE_SECONDS))
        return lease


class LeaseApi(LeaseSteps):
    @operation
    def ask_lease(self, **options: Unpack[LeaseOptions]) -> Steps[Lease]:
        """Ask for a lease without waiting for it. Renew it, also while it is pending, and release it at the
        end."""
        return (yield from self._new_lease(options))

    @operation
    def get_lease(self, lease: AnyLease) -> Steps[Lease]:
        """Return the lease as it is now."""
        return decode(Lease, (yield from self._ask("GET", _path(lease))))

    @listing
    def leases(
        self,
        *,
        state: str | None = None,
        holder: str | None = None,
        sort: str | None = None,
        tenant: str | None = None,
    ) -> Pages[Lease]:
        """Yield all leases that match, newest first. `state` may be several states, separated by commas.
        `sort` is submitted or priority; a `-` before it puts the latest or the highest first. `tenant` is
        another tenant, or `*` for all, which needs the scope admin."""
        return self._pages(Lease, "/leases", state=state, holder=holder, sort=sort, tenant=tenant)

    @operation
    def renew_lease(self, lease: AnyLease, ttl_seconds: float | None = None) -> Steps[Lease]:
        """Keep the lease for another TTL. Raises Refused (`lease-under-notice`, `lease-ended`)."""
        return (yield from self._renewed(lease, ttl_seconds))

    @operation
    def release_lease(self, lease: AnyLease) -> Steps[Lease]:
        """State that the memory of the lease is free, or that the lease is no longer wanted."""
        return (yield from self._released(lease))


def _path(lease: AnyLease) -> str:
    return f"/leases/{path_part(lease.id if isinstance(lease, Lease) else lease)}"


def _this_program() -> str:
    program = Path(sys.argv[0]).name or "python"
    return f"{program} of {user_name()} on {socket.gethostname()} ({os.getpid()})"
