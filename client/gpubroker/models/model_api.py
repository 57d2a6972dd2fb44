"""Operations on models and uploaded objects: ask, queue, load, unload, pin, upload."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Unpack

from gpubroker.errors import BrokerError, ModelUnavailable
from gpubroker.models.inference import (
    InferLaterOptions,
    InferOptions,
    InferStreamOptions,
    Inputs,
    as_object,
    check_model,
    event_in,
    infer_call,
    inference_body,
    stream_call,
    tensors_of,
    uploads_of,
)
from gpubroker.models.stored_object import StoredObject
from gpubroker.models.tensors import decode_outputs, object_body
from gpubroker.tasks.object_api import AnyObject, object_id_of, upload_call
from gpubroker.tasks.task import AnyTask, Task, check_success, id_of
from gpubroker.tasks.waiting import Deadline
from gpubroker.transport.decoding import Page, decode, page_of
from gpubroker.transport.exchange import Answer, Call, Steps, exchange
from gpubroker.transport.operations import (
    Lines,
    Operations,
    Pages,
    json_body,
    listing,
    operation,
    path_part,
    without_none,
)
from gpubroker.wire.models import MeasuredModel, ServedModel
from gpubroker.wire.objects import ObjectUsage
from gpubroker.wire.tasks import Outcome

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_OBJECTS_PER_PAGE = 500

_MEASURE_SECONDS = 3600.0
"""The longest wait for a measurement, in which the model is asked at its batch sizes and unloaded. The
service bounds the time of each request."""


class ModelApi(Operations):
    @operation
    def infer(
        self, model: str, inputs: "Mapping[str, ArrayLike]", **options: Unpack[InferOptions]
    ) -> Steps[dict[str, "NDArray[Any]"]]:
        """Ask a model that Triton serves; arrays in, arrays out.

            probabilities = broker.infer("resnet", {"image": pixels}, priority="interactive")["probabilities"]

        Text (str or bytes) is BYTES, and comes back as arrays of `bytes`. The options are those of
        `InferOptions`: priority, model_type, outputs, version, parameters, timeout_seconds, idempotent. The
        method waits until the model is loaded and has a free slot. Raises ModelUnavailable, Refused or
        Unreachable; errors of Triton itself have no `code`; `retry_after_seconds` is set if the service knows
        when to try again.
        """
        call = infer_call(model, inputs, options)
        retry_seconds = self._retry_seconds if options.get("timeout_seconds") is None else 0.0
        return decode_outputs((yield from _naming(model, call, retry_seconds)))

    @listing
    def infer_stream(
        self, model: str, inputs: Mapping[str, Any], **options: Unpack[InferStreamOptions]
    ) -> Lines[dict[str, Any]]:
        """Ask a model that answers piece by piece, such as a language model; yield a dict for each piece as
        it arrives.

            for piece in broker.infer_stream("llama", {"text_input": "Hello", "max_tokens": 100}):
                print(piece["text_output"], end="")

        The model may be decoupled. `inputs` are text, numbers, booleans and lists of them, by the names of
        inputs; other names are parameters of the model (Triton's `generate_stream`). Leave the loop to stop
        the model. The options are priority, model_type, version and timeout_seconds, as for `infer`. The
        request is sent only once. Raises what `infer` raises, and BrokerError for an error of the model in
        the middle of the stream.
        """
        return Lines(stream_call(model, inputs, options), event_in)

    @operation
    def infer_later(self, model: str, inputs: Inputs, **options: Unpack[InferLaterOptions]) -> Steps[Task]:
        """Queue a request to a model; when this returns, the task is on the service's disk.

            task = broker.infer_later("resnet", {"image": pixels}, priority="batch")
            broker.outputs(task)["probabilities"]

        The request is answered when the model is in memory and idle, in a batch with similar requests.
        `inputs` are arrays by name, as for `infer`, a `StoredObject` from `upload`, or mappings with
        datatype, shape, and data or object. `result` is the JSON of Triton's protocol. The options are those
        of `InferLaterOptions`. Arrays of more than 4 MiB together are uploaded as objects, of which the
        service keeps no copy. Raises Refused.
        """
        tensors = tensors_of(model, inputs, options)
        for at in uploads_of(tensors):
            tensor, data = tensors[at]
            stored = (yield from self._send(upload_call(data))).json()
            tensors[at] = as_object(tensor, stored["id"]), b""
        body, headers = inference_body(model, tensors, options)
        made = yield from self._make("/inferences", options.get("idempotency_key"), body, headers)
        return decode(Task, made)

    @operation
    def outputs(
        self, task: AnyTask, timeout_seconds: float | None = None
    ) -> Steps[dict[str, "NDArray[Any]"]]:
        """Wait for a queued inference and return the outputs of the model: arrays by name, as `infer` does.

        Raises TaskFailed, TaskCancelled or WaitTimeout.
        """
        deadline, id = Deadline(timeout_seconds), path_part(id_of(task))
        while True:
            left = deadline.next_poll_seconds()
            path, params = f"/inferences/{id}/outputs", {"timeout_seconds": left}
            try:
                answer = yield from self._send(Call("GET", path, params, patience_seconds=left))
            except BrokerError as fault:
                if fault.code == "not-found":
                    check_success(decode(Outcome, (yield from self._ask("GET", f"/tasks/{id}/result"))))
                if fault.code != "task-not-finished":
                    raise
            else:
                return decode_outputs(answer)
            if deadline.is_over():
                raise deadline.error(decode(Task, (yield from self._ask("GET", f"/tasks/{id}"))))

    @operation
    def triton_healthy(self) -> Steps[bool]:
        """Return True if a model server answers. Raises Unreachable if the service does not answer."""
        try:
            yield from exchange(Call("GET", "/v2/health/ready"), 0.0)
        except BrokerError as fault:
            if fault.status == 0:
                raise
            return False
        return True

    @operation
    def models(
        self,
        *,
        state: str | Sequence[str] | None = None,
        server: str | None = None,
        sort: str | None = None,
    ) -> Steps[Page[ServedModel]]:
        """Return the models of all servers, those in memory first. `state` is one or several of resident,
        loading, draining, waiting and cold. `sort` is state (the default), name, gpu_mb, priority or loaded;
        a `-` before it puts the largest or the latest first."""
        raw = yield from self._ask("GET", "/models", state=state, server=server, sort=sort)
        return page_of(ServedModel, raw)

    @operation
    def model(self, name: str, *, server: str | None = None) -> Steps[ServedModel]:
        """Return one model. Here and in the methods below, `server` is needed if several servers have the
        model."""
        check_model(name, "model()")
        return decode(ServedModel, (yield from self._ask("GET", f"/models/{path_part(name)}", server=server)))

    @operation
    def load_model(
        self,
        name: str,
        *,
        priority: int | str | None = None,
        wait_seconds: float = 0.0,
        server: str | None = None,
    ) -> Steps[ServedModel]:
        """Load the model into memory, and wait up to `wait_seconds` for it."""
        body = {"wait_seconds": wait_seconds, **without_none({"priority": priority})}
        return (yield from self._change_model(name, "load", body, server, wait_seconds))

    @operation
    def unload_model(self, name: str, *, server: str | None = None) -> Steps[ServedModel]:
        """Unload the model once it has answered its requests; the next request loads it again."""
        return (yield from self._change_model(name, "unload", None, server))

    @operation
    def pin_model(self, name: str, *, pinned: bool = True, server: str | None = None) -> Steps[ServedModel]:
        """Keep the model in memory even if others need the room. `pinned=False` ends that."""
        return (yield from self._change_model(name, "pin", {"pinned": pinned}, server))

    @operation
    def measure_model(
        self,
        name: str,
        *,
        batch_sizes: Sequence[int] = (),
        shapes: Mapping[str, Sequence[int]] | None = None,
        priority: int | str | None = None,
        wait_seconds: float = 300.0,
        server: str | None = None,
    ) -> Steps[MeasuredModel]:
        """Load the model, send it requests of zeros while its GPU is measured, and unload it. Its later loads
        lease the size that was learned.

        `batch_sizes` are the numbers of rows of the requests. Default: 1 and the largest that the model
        takes. `shapes` are the shapes of single inputs, without rows. Default: the model's own shape, and 1
        for a dimension of any length. `wait_seconds` is the longest wait until the model is in memory. Raises
        Refused: `model-in-use`, or `not-measurable` with the reason.
        """
        check_model(name, "measure_model()")
        body = {
            "batch_sizes": [*batch_sizes],
            "shapes": {name: [*shape] for name, shape in (shapes or {}).items()},
            "wait_seconds": wait_seconds,
            **without_none({"priority": priority}),
        }
        call = Call(
            "POST",
            f"/models/{path_part(name)}/measure",
            params=without_none({"server": server}),
            body=json_body(body),
            patience_seconds=wait_seconds + _MEASURE_SECONDS,
            repeatable=False,
        )
        return decode(MeasuredModel, (yield from _naming(name, call, 0.0)).json())

    @operation
    def upload(self, data: "bytes | BinaryIO | ArrayLike") -> Steps[StoredObject]:
        """Store an array, bytes or a file once, as an input of any number of `infer_later` calls.

        A file must be opened in binary mode. It is read while it is sent, so it may be larger than memory.
        Raises Refused, with the code `objects-full` if the tenant's limit is reached.
        """
        body, array = object_body(data)
        return decode(StoredObject, (yield from self._send(upload_call(body))).json(), **array)

    @listing
    def objects(self, *, sort: str | None = None) -> Pages[StoredObject]:
        """Yield all objects of your tenant, fetched page by page as they are used. `sort` is id (the
        default), created or size; a `-` before it puts the latest or the largest first.

        The datatype and shape of an array are only in the answer of `upload`.
        """
        return self._pages(StoredObject, "/objects", limit=_OBJECTS_PER_PAGE, sort=sort)

    @operation
    def object_usage(self) -> Steps[ObjectUsage]:
        """Return how many bytes the objects of your tenant take, and the limit."""
        return decode(ObjectUsage, (yield from self._ask("GET", "/objects", limit=1)))

    @operation
    def delete_object(self, stored: AnyObject) -> Steps[None]:
        """Delete an object. A queued request that still needs it fails. Raises Refused (`not-found`)."""
        yield from self._ask_once("DELETE", f"/objects/{path_part(object_id_of(stored))}")

    def _change_model(
        self,
        name: str,
        verb: str,
        body: Mapping[str, Any] | None,
        server: str | None,
        patience_seconds: float = 0.0,
    ) -> Steps[ServedModel]:
        check_model(name, f"{verb}_model()")
        call = Call(
            "POST",
            f"/models/{path_part(name)}/{verb}",
            params=without_none({"server": server}),
            body=json_body(body),
            patience_seconds=patience_seconds,
        )
        return decode(ServedModel, (yield from _naming(name, call, self._retry_seconds)).json())


def _naming(model: str, call: Call, retry_seconds: float) -> Steps[Answer]:
    """Exchange the call, and add the name of the model to a ModelUnavailable."""
    try:
        return (yield from exchange(call, retry_seconds))
    except ModelUnavailable as fault:
        fault.model = model
        raise
