"""The SDK: `Broker` for threads and `AsyncBroker` for asyncio. Their methods come from the API classes of the
packages."""

from typing import TYPE_CHECKING, Unpack

from gpubroker.admin import AdminApi
from gpubroker.cluster.cluster_api import ClusterApi
from gpubroker.cluster.stream_api import StreamApi
from gpubroker.leases.lease import LeaseOptions
from gpubroker.leases.lease_api import LeaseApi
from gpubroker.models.model_api import ModelApi
from gpubroker.tasks.array_api import ArrayApi
from gpubroker.tasks.output_api import OutputApi
from gpubroker.tasks.worker_set_api import WorkerSetApi
from gpubroker.transport.http import AsyncHttp, SyncHttp

if TYPE_CHECKING:
    from gpubroker.leases.held_lease import AsyncHeldLease, HeldLease


class Broker(
    SyncHttp, OutputApi, ArrayApi, WorkerSetApi, LeaseApi, ModelApi, ClusterApi, StreamApi, AdminApi
):
    """A gpubroker service. Safe to share between threads; close it, or use it in a `with`.

    The address and the token come from the arguments, else from GPUBROKER_URL and GPUBROKER_TOKEN, else
    from the file that a service on this machine writes for its users. `timeout_seconds` limits one request;
    lost connections and temporary refusals are retried for `retry_seconds`, which is safe because every
    submit carries an idempotency key. Every method may raise Unreachable, Refused or BrokerError.
    """

    def lease(self, *, timeout_seconds: float | None = None, **options: Unpack[LeaseOptions]) -> "HeldLease":
        """Lease GPU memory for this program, or for one that it starts; the lease is held and renewed inside
        the block.

            with broker.lease(gpu_mb=20 * 1024, ttl_seconds=60) as lease:
                server = subprocess.Popen(command, env=os.environ | lease.environment)
                lease.wait_for_notice()

        Entering the block waits for the memory, at most `timeout_seconds`, and raises LeaseEnded if it is not
        given. `lease.device_uuids` are the GPUs; `lease.notice` says why and by when to leave the block. Free
        the memory before the block ends. The options are those of `LeaseOptions`: holder, gpu_mb (of each
        GPU; without it, whole GPUs), gpus, priority, ttl_seconds, grace_seconds, pid, node, devices, kinds,
        labels.
        """
        from gpubroker.leases.held_lease import HeldLease

        return HeldLease(self._retry_seconds, self._carry_out, options, timeout_seconds)


class AsyncBroker(
    AsyncHttp, OutputApi, ArrayApi, WorkerSetApi, LeaseApi, ModelApi, ClusterApi, StreamApi, AdminApi
):
    """`Broker` for asyncio, with the same arguments, methods and exceptions. Close it, or use `async with`.

    `list`, `events`, `leases`, `logs`, `objects`, `download`, `map`, `array_items`, `array_progress` and
    `infer_stream` are asynchronous iterators; everything else is awaited.
    """

    def lease(
        self, *, timeout_seconds: float | None = None, **options: Unpack[LeaseOptions]
    ) -> "AsyncHeldLease":
        """Lease GPU memory as `Broker.lease` does, with `async with broker.lease(...) as lease:`."""
        from gpubroker.leases.held_lease import AsyncHeldLease

        return AsyncHeldLease(self._retry_seconds, self._carry_out, options, timeout_seconds)
