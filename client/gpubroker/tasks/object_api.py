"""Operations on objects that tasks open: store a value once, and name it in the arguments of many."""

from typing import Any

from gpubroker.runtime.objects import ObjectRef, object_bytes, opened_object
from gpubroker.transport.exchange import Call, Steps
from gpubroker.transport.operations import Operations, operation, path_part

_UPLOAD_SECONDS = 600.0

NamedObject = ObjectRef | str
"""An object, or its id."""


class ObjectApi(Operations):
    @operation
    def put(self, value: Any) -> Steps[ObjectRef]:
        """Store a value once, for the arguments of any number of tasks: a numpy array, bytes, or anything
        that cloudpickle can carry.

            weights = broker.put(array)
            tasks = [broker.submit(evaluate, weights, seed) for seed in range(1000)]

        The function gets the value itself. It is fetched once per node; arrays are read-only there and not
        copied, and bytes are a read-only memoryview. Only functions get pickled values, not entrypoints.
        Raises Refused, with the code `objects-full` if the tenant's limit is reached.
        """
        headers = {"Content-Type": "application/octet-stream"}
        body = object_bytes(value)
        call = Call("POST", "/objects", body=body, headers=headers, patience_seconds=_UPLOAD_SECONDS)
        stored = (yield from self._send(call)).json()
        return ObjectRef(stored["id"], stored["size_bytes"])

    @operation
    def fetch(self, stored: NamedObject) -> Steps[Any]:
        """The value of an object, as `put` took it; arrays are read-only. Unpickles what was pickled, which
        runs code that its owner chose. Raises Refused (`not-found`)."""
        id = stored if isinstance(stored, str) else stored.id
        data = yield from self._content(id)
        return opened_object(memoryview(data), unpickles=True)

    def _content(self, id: str) -> Steps[bytes]:
        call = Call("GET", f"/objects/{path_part(id)}/content", patience_seconds=_UPLOAD_SECONDS)
        return (yield from self._send(call)).content
