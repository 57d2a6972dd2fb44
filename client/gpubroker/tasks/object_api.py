"""Operations on objects that tasks open: store a value once, and name it in the arguments of many tasks."""

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

from gpubroker.errors import BrokerError, Refused, WrongArgument
from gpubroker.runtime.carrying import faulty_part, is_not_pickled
from gpubroker.runtime.objects import ObjectRef, object_buffers, opened_object
from gpubroker.transport.bodies import Body, BuffersBody, FileBody, is_binary_file
from gpubroker.transport.decoding import Page, a_page
from gpubroker.transport.exchange import Call, Steps
from gpubroker.transport.operations import Operations, Pages, listing, operation, path_part

_TRANSFER_SECONDS = 600.0
PART_BYTES = 2 * 2**20
"""The number of bytes that one request of a download asks for."""


class Stored(Protocol):
    """The type of an `ObjectRef`, and of what `upload` and `objects` return."""

    @property
    def id(self) -> str: ...


AnyObject = Stored | str
"""An object, or its id."""


class ObjectApi(Operations):
    @operation
    def put(self, value: Any) -> Steps[ObjectRef]:
        """Store a value once, for the arguments of any number of tasks: a numpy array, bytes, a file opened
        in binary mode, or anything that cloudpickle can carry.

            weights = broker.put(array)
            tasks = [broker.submit(evaluate, weights, seed) for seed in range(1000)]

        The function gets the value itself. It is fetched once per node; arrays are read-only there and not
        copied, and bytes are a read-only memoryview. Only functions get pickled values, not entrypoints.
        A file is read while it is sent. Raises WrongArgument for what cannot be pickled, and Refused, with
        the code `objects-full` if the tenant's limit is reached.
        """
        body = FileBody(value) if is_binary_file(value) else BuffersBody(_buffers_of(value))
        stored = (yield from self._send(upload_call(body))).json()
        return ObjectRef(stored["id"], stored["size_bytes"])

    @operation
    def fetch(self, stored: AnyObject) -> Steps[Any]:
        """Return the value that `put` stored; arrays are read-only. A pickled value is unpickled, which runs
        code that its owner chose. Raises Refused (`not-found`)."""
        data = yield from self._content(object_id_of(stored))
        return opened_object(memoryview(data), unpickles=True)

    @listing
    def download(self, stored: AnyObject) -> Pages[bytes]:
        """Yield the bytes of an object in parts of 2 MiB, each fetched when it is needed.

            with open("weights.bin", "wb") as file:
                file.writelines(broker.download(weights))

        Raises Refused (`not-found`), and at the end BrokerError (`result-damaged`) if the bytes are not those
        that were stored.
        """
        id, digest = object_id_of(stored), hashlib.sha256()

        def fetch(cursor: str | None) -> Steps[Page[bytes]]:
            begin = int(cursor or 0)
            span = {"Range": f"bytes={begin}-{begin + PART_BYTES - 1}"}
            try:
                answer = yield from self._send(Call("GET", _content_path(id), headers=span))
            except Refused as fault:
                if begin or fault.code != "range-not-satisfiable":
                    raise
                return a_page(())  # the object is empty
            digest.update(answer.content)
            end = begin + len(answer.content)
            # A service of release 0.2 ignores ranges and sends the whole object.
            size = answer.headers.get("content-range", str(end)).rpartition("/")[2]
            if end < int(size):
                return a_page((answer.content,), str(end))
            if digest.hexdigest() != id:
                found = f"the bytes of object {id} have the digest {digest.hexdigest()}: discard them"
                raise BrokerError(found, code="result-damaged")
            return a_page((answer.content,))

        return Pages(fetch)

    def _content(self, id: str) -> Steps[bytes]:
        call = Call("GET", _content_path(id), patience_seconds=_TRANSFER_SECONDS)
        return (yield from self._send(call)).content


def _buffers_of(value: Any) -> Sequence[bytes | memoryview]:
    try:
        return object_buffers(value)
    except Exception as error:  # objects may raise anything when they are pickled
        part = faulty_part([("the value", value)], is_not_pickled) or "the value"
        raise WrongArgument(
            f"cannot pickle {part} ({type(error).__name__}: {error}); store plain values"
        ) from error


def object_id_of(stored: AnyObject) -> str:
    return stored if isinstance(stored, str) else stored.id


def upload_call(body: bytes | Body) -> Call:
    headers = {"Content-Type": "application/octet-stream"}
    return Call("POST", "/objects", body=body, headers=headers, patience_seconds=_TRANSFER_SECONDS)


def _content_path(id: str) -> str:
    return f"/objects/{path_part(id)}/content"
