"""Leases as context managers: held within the block, renewed meanwhile, given back at its end."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from gpubroker.errors import BrokerError
from gpubroker.leases.lease import Lease, LeaseOptions, Notice, Standing
from gpubroker.leases.operations import LeaseOperations
from gpubroker.transport.exchange import Steps

_JOIN_SECONDS = 5.0


class _Held:
    """What both kinds tell of the lease within their block."""

    _standing: Standing | None = None

    @property
    def lease(self) -> Lease:
        """As it was last told."""
        if self._standing is None:
            raise RuntimeError("the lease is held within its block: `with broker.lease(...) as lease:`")
        return self._standing.lease

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
        """For a program that shall see these GPUs and no others."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.device_uuids)}

    @property
    def notice(self) -> Notice | None:
        """Why and by when to leave the block; None while the lease may be held."""
        return None if self._standing is None else self._standing.notice

    @property
    def fault(self) -> BrokerError | None:
        """What the service said where the notice is `refused`."""
        return None if self._standing is None else self._standing.fault

    @property
    def is_unreachable(self) -> bool:
        """Whether the service could not be asked last time. The lease holds on: nobody else gets its memory
        before its holder has left, and a service that comes back hears of it first."""
        return self._standing is not None and self._standing.is_unreachable


class HeldLease(_Held):
    """A thread renews it. Entering the block waits for the memory and may raise LeaseEnded."""

    def __init__(
        self,
        do: LeaseOperations,
        carry_out: Callable[[Steps[Any]], Any],
        options: LeaseOptions,
        timeout_seconds: float | None,
    ) -> None:
        self._do = do
        self._carry_out = carry_out
        self._options = options
        self._timeout_seconds = timeout_seconds
        self._thread: threading.Thread | None = None

    def wait_for_notice(self, timeout_seconds: float | None = None) -> bool:
        """Sleep until the lease has to be given back; whether it has."""
        assert self._standing is not None
        return self._standing.wait(timeout_seconds)

    def __enter__(self) -> Self:
        asked: Lease = self._carry_out(self._do.ask(self._options))
        try:
            lease: Lease = self._carry_out(self._do.acquire(asked, self._timeout_seconds))
        except BaseException:
            with contextlib.suppress(BrokerError):
                self._carry_out(self._do.release(asked))
            raise
        self._standing = Standing(lease)
        self._thread = threading.Thread(target=self._keep, name=f"lease-{lease.id}", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._standing is not None
        assert self._thread is not None
        self._standing.is_over = True
        # The thread hears of the release at once, where it waits for the notice.
        self._carry_out(self._do.release(self._standing.lease))
        self._thread.join(_JOIN_SECONDS)

    def _keep(self) -> None:
        assert self._standing is not None
        try:
            self._carry_out(self._do.keep(self._standing))
        except Exception:
            if not self._standing.is_over:
                self._standing.give(Notice("ended"))
                raise


class AsyncHeldLease(_Held):
    """A task of the loop renews it. Entering the block waits for the memory, and may raise LeaseEnded."""

    def __init__(
        self,
        do: LeaseOperations,
        carry_out: Callable[[Steps[Any]], Coroutine[Any, Any, Any]],
        options: LeaseOptions,
        timeout_seconds: float | None,
    ) -> None:
        self._do = do
        self._carry_out = carry_out
        self._options = options
        self._timeout_seconds = timeout_seconds
        self._told = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    async def wait_for_notice(self, timeout_seconds: float | None = None) -> bool:
        """Sleep until the lease has to be given back; whether it has."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._told.wait(), timeout_seconds)
        return self._told.is_set()

    async def __aenter__(self) -> Self:
        asked: Lease = await self._carry_out(self._do.ask(self._options))
        try:
            lease: Lease = await self._carry_out(self._do.acquire(asked, self._timeout_seconds))
        except BaseException:
            with contextlib.suppress(BrokerError):
                await asyncio.shield(self._carry_out(self._do.release(asked)))
            raise
        self._standing = Standing(lease)
        self._keeping = asyncio.create_task(self._keep(self._standing))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._standing is not None
        assert self._keeping is not None
        self._standing.is_over = True
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        await self._carry_out(self._do.release(self._standing.lease))

    async def _keep(self, standing: Standing) -> None:
        try:
            await self._carry_out(self._do.keep(standing))
        except Exception:
            standing.give(Notice("ended"))
            raise
        finally:
            if standing.notice is not None:
                self._told.set()
