"""Every operation on external leases, as generators; see `gpubroker.operations`."""

import getpass
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpubroker.errors import BrokerError, Refused
from gpubroker.leases.lease import (
    AGAIN_SECONDS,
    AnyLease,
    Lease,
    LeaseEnded,
    LeaseOptions,
    LeaseState,
    Standing,
)
from gpubroker.tasks.task import Page
from gpubroker.transport.exchange import Answer, Call, Pause, Steps, exchange

_NEVER_AGAIN = frozenset({"unauthenticated", "forbidden", "not-found", "closed"})
"""Codes by which the service itself, or the SDK, says that this program cannot renew. A proxy's 4xx has no
code."""


class LeaseOperations:
    def __init__(self, retry_seconds: float) -> None:
        self._retry_seconds = retry_seconds

    def ask(self, options: LeaseOptions) -> Steps[Lease]:
        asked: dict[str, Any] = {"holder": _this_program(), **options}
        key = asked.pop("idempotency_key", None) or uuid.uuid4().hex
        headers = {"Idempotency-Key": f'"{key}"'}
        return Lease.of(
            (yield from self._send(Call("POST", "/leases", body=_json(asked), headers=headers))).json()
        )

    def get(self, lease: AnyLease) -> Steps[Lease]:
        return Lease.of((yield from self._send(Call("GET", _path(lease)))).json())

    def page(self, cursor: str | None, state: str | None, holder: str | None) -> Steps[Page[Lease]]:
        params = {"state": state, "holder": holder, "cursor": cursor}
        given = {name: value for name, value in params.items() if value is not None}
        raw = (yield from self._send(Call("GET", "/leases", params=given))).json()
        return Page(tuple(Lease.of(item) for item in raw["items"]), raw.get("next_cursor"), raw)

    def renew(self, lease: AnyLease, ttl_seconds: float | None = None) -> Steps[Lease]:
        body = {} if ttl_seconds is None else {"ttl_seconds": ttl_seconds}
        return Lease.of(
            (yield from self._send(Call("POST", f"{_path(lease)}/renew", body=_json(body)))).json()
        )

    def release(self, lease: AnyLease) -> Steps[Lease]:
        return Lease.of((yield from self._send(Call("DELETE", _path(lease)))).json())

    def wait(self, lease: AnyLease, state: str, seconds: float) -> Steps[Lease]:
        """Back when it is no longer in that state, or when the time is over."""
        params = {"state": state, "timeout_seconds": round(max(0.0, seconds), 3)}
        call = Call("GET", f"{_path(lease)}/wait", params=params, patience_seconds=seconds)
        return Lease.of((yield from self._send(call)).json())

    def acquire(self, lease: Lease, timeout_seconds: float | None) -> Steps[Lease]:
        """Renew it while it waits, until it is held. Raises LeaseEnded if that does not come to pass."""
        began = time.monotonic()
        while lease.state is LeaseState.PENDING:
            left = lease.interval_seconds
            if timeout_seconds is not None:
                left = min(left, timeout_seconds - (time.monotonic() - began))
            if left <= 0:
                why = "" if lease.pending is None else f": {lease.pending.message}"
                raise LeaseEnded(lease.id, f"no memory was given within {timeout_seconds:g} s{why}")
            lease = yield from self._sit_out(lease, LeaseState.PENDING, left)
            if lease.state is LeaseState.PENDING:
                yield from self.renew(lease)
        if lease.state is not LeaseState.HELD:
            why = f": {lease.error.message}" if lease.error else ""
            raise LeaseEnded(lease.id, f"lease {lease.id} is {lease.raw.get('state')}{why}")
        return lease

    def keep(self, standing: Standing) -> Steps[None]:
        """Renew it again and again until its holder has to leave, or has left."""
        while not standing.is_over and standing.notice is None:
            try:
                standing.note((yield from self._renewed_in_time(standing)))
            except BrokerError as fault:
                if fault.code in _NEVER_AGAIN:
                    standing.refuse(fault)
                else:
                    standing.is_unreachable = True
                    yield Pause(AGAIN_SECONDS)

    def _renewed_in_time(self, standing: Standing) -> Steps[Lease]:
        """Back after a part of its time to live, or as soon as it is no longer held."""
        lease = yield from self._sit_out(standing.lease, LeaseState.HELD, standing.lease.interval_seconds)
        if lease.state is not LeaseState.HELD or standing.is_over:
            return lease
        try:
            return (yield from self.renew(lease))
        except Refused as refused:
            if refused.code not in ("lease-ended", "lease-under-notice"):
                raise
        return (yield from self.get(lease))

    def _sit_out(self, lease: Lease, state: LeaseState, seconds: float) -> Steps[Lease]:
        """As `wait`, but not back at once with nothing new: so answers a service that stops, or a proxy that
        cuts long answers short."""
        began = time.monotonic()
        lease = yield from self.wait(lease, state, seconds)
        left = seconds - (time.monotonic() - began)
        if lease.state is state and left > seconds / 2:
            yield Pause(min(left, AGAIN_SECONDS))
        return lease

    def _send(self, call: Call) -> Steps[Answer]:
        return (yield from exchange(call, self._retry_seconds))


def _path(lease: AnyLease) -> str:
    return f"/leases/{quote(lease.id if isinstance(lease, Lease) else lease, safe='')}"


def _json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, allow_nan=False).encode()


def _this_program() -> str:
    program = Path(sys.argv[0]).name or "python"
    return f"{program} of {getpass.getuser()} on {socket.gethostname()} ({os.getpid()})"
