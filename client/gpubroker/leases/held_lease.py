"""Leases as context managers: the lease is held and renewed in the block, and released at its end."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from gpubroker.errors import BrokerError
from gpubroker.leases.lease import LeaseOptions, LeaseStatus, over
from gpubroker.leases.lease_api import LeaseSteps
from gpubroker.transport.exchange import Steps
from gpubroker.wire.leases import Lease, Notice

_JOIN_SECONDS = 5.0


class _Held(LeaseSteps):
    """The properties that both kinds of held lease have inside their blocks."""

    _held: LeaseStatus | None = None

    def __init__(
        self,
        retry_seconds: float,
        carry_out: Callable[[Steps[Any]], Any],
        options: LeaseOptions,
        timeout_seconds: float | None,
    ) -> None:
        self._retry_seconds = retry_seconds
        self._carry_out = carry_out
        self._options = options
        self._timeout_seconds = timeout_seconds

    @property
    def _status(self) -> LeaseStatus:
        if self._held is None:
            raise RuntimeError("the lease is only held inside its block: `with broker.lease(...) as lease:`")
        return self._held

    @property
    def lease(self) -> Lease:
        """The lease, as the service last answered it."""
        return self._status.lease

    @property
    def id(self) -> str:
        return self.lease.id

    @property
    def node(self) -> str | None:
        return self.lease.node

    @property
    def device_uuids(self) -> tuple[str, ...]:
        return self.lease.device_uuids

    @property
    def environment(self) -> dict[str, str]:
        """The environment for a program that may see these GPUs and no others."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.device_uuids)}

    @property
    def notice(self) -> Notice | None:
        """The reason and the deadline for leaving the block; None while the lease may be held."""
        return None if self._held is None else self._held.notice

    @property
    def fault(self) -> BrokerError | None:
        """The service's answer if the notice is `refused`."""
        return None if self._held is None else self._held.fault

    @property
    def is_unreachable(self) -> bool:
        """True if the last renewal got no answer. The lease goes on: its memory is not given away before its
        holder has left, and a service that comes back learns of the lease first."""
        return self._held is not None and self._held.is_unreachable


class HeldLease(_Held):
    """A held lease that a thread renews. Entering the block waits for the memory and may raise LeaseEnded."""

    _thread: threading.Thread

    def wait_for_notice(self, timeout_seconds: float | None = None) -> bool:
        """Sleep until the lease has to be released; return True if it has to, and False after
        `timeout_seconds`."""
        return self._status.wait_for_notice(timeout_seconds)

    def __enter__(self) -> Self:
        asked: Lease = self._carry_out(self._new_lease(self._options))
        try:
            lease: Lease = self._carry_out(self._acquire(asked, self._timeout_seconds))
        except BaseException:
            with contextlib.suppress(BrokerError):
                self._carry_out(self._released(asked))
            raise
        self._held = LeaseStatus(lease)
        self._thread = threading.Thread(
            target=self._keep_renewed, args=(self._held,), name=f"lease-{lease.id}", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.is_over = True
        # The release ends the thread's current wait.
        self._carry_out(self._released(self.lease))
        self._thread.join(_JOIN_SECONDS)

    def _keep_renewed(self, status: LeaseStatus) -> None:
        try:
            self._carry_out(self._keep(status))
        except Exception:
            if not status.is_over:
                status.give_notice(over("ended"))
                raise


class AsyncHeldLease(_Held):
    """A held lease that an asyncio task renews. Entering the block waits for the memory and may raise
    LeaseEnded."""

    _carry_out: Callable[[Steps[Any]], Coroutine[Any, Any, Any]]
    _keeper: asyncio.Task[None]
    _has_notice: asyncio.Event

    async def wait_for_notice(self, timeout_seconds: float | None = None) -> bool:
        """Sleep until the lease has to be released; return True if it has to, and False after
        `timeout_seconds`."""
        status = self._status
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_notice.wait(), timeout_seconds)
        return status.notice is not None

    async def __aenter__(self) -> Self:
        asked: Lease = await self._carry_out(self._new_lease(self._options))
        try:
            lease: Lease = await self._carry_out(self._acquire(asked, self._timeout_seconds))
        except BaseException:
            with contextlib.suppress(BrokerError):
                await asyncio.shield(self._carry_out(self._released(asked)))
            raise
        self._held = LeaseStatus(lease)
        self._has_notice = asyncio.Event()
        self._keeper = asyncio.create_task(self._keep_renewed(self._held))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.is_over = True
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        await self._carry_out(self._released(self.lease))

    async def _keep_renewed(self, status: LeaseStatus) -> None:
        try:
            await self._carry_out(self._keep(status))
        except Exception:
            status.give_notice(over("ended"))
            raise
        finally:
            if status.notice is not None:
                self._has_notice.set()
