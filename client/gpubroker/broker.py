"""The synchronous SDK: one method per operation, carried out over one pooled HTTP connection."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import httpx

from gpubroker.cluster.fleet import Gpu, Node, Stats, Tenant
from gpubroker.cluster.plan import FleetPlan
from gpubroker.cluster.policy import Policy
from gpubroker.cluster.quarantine import Detection, Quarantined, Released
from gpubroker.leases.holding import HeldLease
from gpubroker.leases.lease import AnyLease, Lease, LeaseOptions
from gpubroker.leases.operations import LeaseOperations
from gpubroker.models.objects import AnyObject, ObjectUsage, StoredObject
from gpubroker.models.queued import InferLaterOptions, Inputs
from gpubroker.models.requests import InferOptions, triton_healthy
from gpubroker.models.served import ServedModel
from gpubroker.operations import (
    EVENTS_PER_PAGE,
    FOLLOW_PAUSE_SECONDS,
    AnyTask,
    ChangeOptions,
    ListOptions,
    Operations,
)
from gpubroker.tasks.batch import Answered, Wanted
from gpubroker.tasks.estimates import Estimate
from gpubroker.tasks.explanation import Explanation, Simulation
from gpubroker.tasks.submission import SubmitOptions, Target
from gpubroker.tasks.task import Event, Outcome, Page, Task, Token
from gpubroker.transport.connection import Connection, find_service
from gpubroker.transport.wire import Wire

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


class Broker:
    """A gpubroker service. Safe to share between threads; close it, or use it in a `with`.

    The address and the token come from the arguments, else from GPUBROKER_URL and GPUBROKER_TOKEN, else
    from the file that a service on this machine leaves for its users. `timeout_seconds` limits one request;
    lost connections and answers of 'not now' are tried again for `retry_seconds`, which is safe because
    every submit carries an idempotency key. Every method may raise Unreachable, Refused or BrokerError.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_seconds: float = 30.0,
        retry_seconds: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.connection: Connection = find_service(url, token)
        self._do = Operations(retry_seconds)
        self._leases = LeaseOperations(retry_seconds)
        self._wire = Wire(self.connection, timeout_seconds, transport)
        self._carry_out = self._wire.carry_out

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._wire.close()

    def submit(self, target: Target, *args: Any, **options: Unpack[SubmitOptions]) -> Task:
        """Queue a task; when this returns it is on the service's disk.

            broker.submit("team.training:fit", "s3://data", kwargs={"epochs": 3}, gpu_mb=18 * 1024)
            broker.submit(["python", "train.py", "--epochs", "3"], gpus=1, priority="batch")
            broker.submit(function, 1, 2)

        `target` is an entrypoint by name (arguments and result are JSON), a command as a list of words, or a
        function, which is pickled and needs the scope `tasks:code`; modules that it imports must be
        importable where it runs. Raises Refused, also for a task that could never fit.

        The options are those of `SubmitOptions`, all by name: kwargs (the task's own), name, priority,
        labels, model_type, stream; gpu_mb (MiB per GPU, or "learned"), gpus, gpu_fraction, exclusive,
        placement, cpu, memory_mb, custom; kinds, prefer_kinds, min_power, min_device_mb, nodes,
        prefer_nodes, pool, roles; bundles, strategy, min_ranks; max_retries, timeout_seconds,
        grace_seconds; after, not_before, queue_ttl_seconds, deadline_at or deadline_seconds,
        expected_seconds; env, working_directory (of commands), result_format, idempotency_key.
        """
        return self._carry_out(self._do.submit(target, args, options))

    def infer_later(self, model: str, inputs: Inputs, **options: Unpack[InferLaterOptions]) -> Task:
        """Queue a question to a model; when this returns it is on the service's disk.

            task = broker.infer_later("resnet", {"image": pixels}, priority="batch")
            broker.result(task)["outputs"][0]["data"]

        It is answered when the model is in memory and has time, together with others that are alike.
        `inputs`: arrays by name, as for `infer`, what `upload` gave for an array, or mappings with datatype,
        shape, and data or object. The result is what Triton's protocol says in JSON. The options are those
        of `InferLaterOptions`. Raises Refused.
        """
        return self._carry_out(self._do.infer_later(model, inputs, options))

    def upload(self, data: "bytes | ArrayLike") -> StoredObject:
        """Store an array or bytes once, for any number of `infer_later` to name. Raises Refused, with the
        code `objects-full` where the tenant has as much as it may."""
        return self._carry_out(self._do.upload(data))

    def objects(self) -> Iterator[StoredObject]:
        """All objects of your tenant, by id, fetched page by page as they are used. What an array was is
        known to the answer of `upload` alone."""
        return self._wire.items(self._do.objects_page)

    def object_usage(self) -> ObjectUsage:
        """How many bytes the objects of your tenant count, and how many they may."""
        return self._carry_out(self._do.object_usage())

    def delete_object(self, stored: AnyObject) -> None:
        """Make room; questions that were queued before have its values already. Raises Refused
        (`not-found`)."""
        self._carry_out(self._do.delete_object(stored))

    def submit_many(
        self,
        tasks: Iterable[Wanted],
        *,
        all_or_nothing: bool = False,
        idempotency_key: str | None = None,
    ) -> Sequence[Answered]:
        """Queue many tasks at once; the ids in their order, and where one is refused the error instead.

            broker.submit_many(Submission("team.images:resize", name, cpu=0.5) for name in names)

        Each is a `Submission`, which takes what `submit` takes, or a mapping, which is the body of
        `POST /tasks`. They are sent by thousands, each thousand in one commit. With `all_or_nothing` up to
        10,000 are stored together, or none: then it raises Refused, whose `errors` name all that are wrong.
        With a key of yours the call can be made again with the same tasks. Raises only if nothing was
        accepted before; a later error stands in the place of each task that it kept out.
        """
        steps = self._do.submit_many(tasks, all_or_nothing=all_or_nothing, key=idempotency_key)
        return self._carry_out(steps)

    def simulate(
        self, target: Target | None = None, *args: Any, **options: Unpack[SubmitOptions]
    ) -> Simulation:
        """What would become of this task if it were submitted now; nothing is. Without a target, of a bare
        demand. A refusal is part of the answer; raises Refused for what the token may not ask."""
        return self._carry_out(self._do.simulate(target, args, options))

    def get(self, task: AnyTask) -> Task:
        return self._carry_out(self._do.get(task))

    def wait(self, task: AnyTask, timeout_seconds: float | None = None) -> Task:
        """Return when the task is finished, however it ended. Raises WaitTimeout; the task goes on."""
        return self._carry_out(self._do.wait(task, timeout_seconds))

    def result(self, task: AnyTask, timeout_seconds: float | None = None) -> Any:
        """Wait for the task and return what it returned. Raises TaskFailed, TaskCancelled or WaitTimeout.

        A result in cloudpickle format, the default for functions, is unpickled here, which runs code that
        the task chose: use `outcome` for tasks you do not trust.
        """
        return self._carry_out(self._do.result(task, timeout_seconds))

    def outcome(self, task: AnyTask) -> Outcome:
        """How a finished task ended, with its pickled result as bytes and the end of its log."""
        return self._carry_out(self._do.outcome(task))

    def cancel(self, task: AnyTask, *, grace_seconds: float | None = None, reason: str | None = None) -> Task:
        """Ask for the task's end; a running one gets notice and then its grace period."""
        return self._carry_out(self._do.cancel(task, grace_seconds, reason))

    def change(self, task: AnyTask, **wanted: Unpack[ChangeOptions]) -> Task:
        """Change a task's priority, hold it in the queue (`held=True`) and release it again, and change its
        times while it waits: what `ChangeOptions` names."""
        return self._carry_out(self._do.change(task, wanted))

    def list(self, **wanted: Unpack[ListOptions]) -> Iterator[Task]:
        """All tasks that match, newest first, fetched page by page as they are used."""
        return self._wire.items(lambda cursor: self._do.page(cursor, wanted))

    def explain(self, task: AnyTask) -> Explanation:
        """Why the task waits, with a verdict per device; or where it runs."""
        return self._carry_out(self._do.explain(task))

    def events(self, task: AnyTask | None = None, *, after: int = 0, follow: bool = False) -> Iterator[Event]:
        """The event log after a position, oldest first; of one task if given. `follow` never ends."""
        while True:
            page = self._carry_out(self._do.events(task, after, EVENTS_PER_PAGE))
            yield from page.items
            after = page.raw["next_after"]
            if page.items:
                continue
            if not follow:
                return
            time.sleep(FOLLOW_PAUSE_SECONDS)

    def estimates(self, subject: str | None = None) -> Page[Estimate]:
        """What your past runs took, by model type (else name, else entrypoint) and kind of device."""
        return self._carry_out(self._do.estimates(subject))

    # Leases of what the broker does not start

    def lease(self, *, timeout_seconds: float | None = None, **options: Unpack[LeaseOptions]) -> HeldLease:
        """GPU memory for this program, or for one that it starts: given within the block, renewed meanwhile.

            with broker.lease(gpu_mb=20 * 1024, ttl_seconds=60) as lease:
                server = subprocess.Popen(command, env=os.environ | lease.environment)
                lease.wait_for_notice()

        Entering waits for the memory, for at most `timeout_seconds`, and raises LeaseEnded where it is not
        given. `lease.device_uuids` are the GPUs; `lease.notice` says why and by when to leave the block. Free
        the memory before its end. The options are those of `LeaseOptions`: holder, gpu_mb (of each GPU; left
        out: whole GPUs), gpus, priority, ttl_seconds, grace_seconds, pid, node, devices, kinds, labels.
        """
        return HeldLease(self._leases, self._carry_out, options, timeout_seconds)

    def ask_lease(self, **options: Unpack[LeaseOptions]) -> Lease:
        """Ask and do not wait. Renew it, also while it waits, and release it in the end."""
        return self._carry_out(self._leases.ask(options))

    def get_lease(self, lease: AnyLease) -> Lease:
        return self._carry_out(self._leases.get(lease))

    def leases(self, *, state: str | None = None, holder: str | None = None) -> Iterator[Lease]:
        """All leases that match, newest first; `state` may be several, separated by commas."""
        return self._wire.items(lambda cursor: self._leases.page(cursor, state, holder))

    def renew_lease(self, lease: AnyLease, ttl_seconds: float | None = None) -> Lease:
        """Raises Refused (`lease-under-notice`, `lease-ended`) where it is too late."""
        return self._carry_out(self._leases.renew(lease, ttl_seconds))

    def release_lease(self, lease: AnyLease) -> Lease:
        """Say that its memory is free, or that it is no longer wanted."""
        return self._carry_out(self._leases.release(lease))

    def gpus(self) -> Page[Gpu]:
        return self._carry_out(self._do.gpus())

    def nodes(self) -> Page[Node]:
        return self._carry_out(self._do.nodes())

    def quarantine(self) -> Page[Quarantined]:
        """What counts as used because nobody can confirm that it is gone; longest first."""
        return self._carry_out(self._do.quarantine())

    def release_quarantine(
        self,
        holder: AnyTask,
        reason: str,
        *,
        attempts: Sequence[int] = (),
        ranks: Sequence[int] = (),
        devices: Sequence[str] = (),
    ) -> Released:
        """State that what holds this memory is gone, or only these attempts, ranks and UUIDs of it. Nobody
        checks it; the token's name and the reason are noted. Raises Refused (`nothing-quarantined`,
        `still-in-use`)."""
        return self._carry_out(self._do.release_quarantine(holder, reason, attempts, ranks, devices))

    def resume(self, reason: str) -> Detection:
        """State that the nodes which fell silent at once are lost. Raises Refused (`nothing-paused`)."""
        return self._carry_out(self._do.resume(reason))

    def infer(
        self, model: str, inputs: "Mapping[str, ArrayLike]", **options: Unpack[InferOptions]
    ) -> "dict[str, NDArray[Any]]":
        """Ask a model that Triton serves; arrays in, arrays out.

            probabilities = broker.infer("resnet", {"image": pixels}, priority="interactive")["probabilities"]

        Text (str or bytes) is BYTES, and comes back as arrays of `bytes`. The options are those of
        `InferOptions`: priority, model_type, outputs, version, parameters, timeout_seconds, idempotent. Waits
        for the model, if it must be loaded first, and for its turn. Raises Refused or Unreachable, also in
        Triton's words, which have no `code`; with `retry_after_seconds` where the service knows when to come
        again.
        """
        return self._carry_out(self._do.infer(model, inputs, options))

    def triton_healthy(self) -> bool:
        """Whether there is a server of models, and it can be asked. Raises Unreachable if nobody can tell."""
        return self._carry_out(triton_healthy())

    def models(self) -> Page[ServedModel]:
        """Of the servers whose memory is in the ledger: in memory, waiting for it, or neither."""
        return self._carry_out(self._do.models())

    def model(self, name: str, *, server: str | None = None) -> ServedModel:
        """`server`: here and below, which one is meant where several have it."""
        return self._carry_out(self._do.model(name, server))

    def load_model(
        self,
        name: str,
        *,
        priority: int | str | None = None,
        wait_seconds: float = 0.0,
        server: str | None = None,
    ) -> ServedModel:
        """Have it brought into memory, and wait so long for it."""
        body = {"wait_seconds": wait_seconds, **({} if priority is None else {"priority": priority})}
        return self._carry_out(self._do.change_model(name, "load", body, server))

    def unload_model(self, name: str, *, server: str | None = None) -> ServedModel:
        """Have it answer what it has, and leave."""
        return self._carry_out(self._do.change_model(name, "unload", None, server))

    def pin_model(self, name: str, *, pinned: bool = True, server: str | None = None) -> ServedModel:
        """Keep it in memory whoever asks for its room, or no longer."""
        return self._carry_out(self._do.change_model(name, "pin", {"pinned": pinned}, server))

    def tenants(self) -> Page[Tenant]:
        """Quota, holding, usage and fair share of tenants: of your own, or of all with cluster:read."""
        return self._carry_out(self._do.tenants())

    def stats(self) -> Stats:
        return self._carry_out(self._do.stats())

    def policy(self) -> Policy:
        """What the operator has chosen: bands, kinds, pools, limits, defaults."""
        return self._carry_out(self._do.policy())

    def ready(self) -> Mapping[str, str]:
        """Return once the service can take and run tasks. Raises Unreachable after `retry_seconds`."""
        return self._carry_out(self._do.ready())

    def plan(
        self,
        components: Sequence[Mapping[str, Any]],
        fleet: Sequence[Mapping[str, Any]] | None = None,
        *,
        tenant: str | None = None,
    ) -> FleetPlan:
        """Whether these components fit the fleet that is there, or this one; nothing is stored. Both are as
        in `POST /plan`: `[{"name": "trainer", "count": 4, "resources": {"gpus": 1}}]`. `tenant`: by whose
        quota and limits; left out: the token's, or nobody's on a fleet that is described."""
        return self._carry_out(self._do.plan(components, fleet, tenant))

    def tokens(self) -> tuple[Token, ...]:
        return self._carry_out(self._do.tokens())

    def create_token(
        self,
        name: str,
        *,
        scopes: Sequence[str],
        tenant: str | None = None,
        max_priority: int | None = None,
        expires_in_seconds: float | None = None,
    ) -> Token:
        """A new token; its secret is in `.token` of this answer and nowhere else."""
        return self._carry_out(
            self._do.create_token(
                name,
                scopes=scopes,
                tenant=tenant,
                max_priority=max_priority,
                expires_in_seconds=expires_in_seconds,
            )
        )

    def revoke_token(self, name: str) -> None:
        self._carry_out(self._do.revoke_token(name))

    def shutdown(self, *, stop_cluster: bool = False) -> None:
        """Ask the service to stop, and with `stop_cluster` the local Ray it started as well."""
        self._carry_out(self._do.shutdown(stop_cluster))
