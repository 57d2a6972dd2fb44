"""Results as JSON text."""

import json
import tracemalloc

from gpubroker_server.core.serving.batching import FORMAT, InferenceResponse, packed
from gpubroker_server.core.serving.tensors import Tensor, tensor_of
from gpubroker_server.gateway.status.records import result_member
from gpubroker_server.ports.store import StoredResult


async def test_a_large_answer_takes_no_more_memory_than_three_times_its_text() -> None:
    """As Python numbers the values would take many times that, with up to `limits.result_bytes`."""
    outputs = (Tensor("y", "UINT8", (200_000,), b"\x07" * 200_000), tensor_of("z", "BF16", [2], [1, 2]))
    data = packed(InferenceResponse("m", "1", outputs))
    stored = StoredResult("succeeded", FORMAT, data, None, None, b"")
    tracemalloc.start()
    try:
        told = await result_member(None, stored)  # type: ignore[arg-type]  # it is in no object
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 * len(told)
    first, second = json.loads(b"{%b}" % told)["result"]["outputs"]
    assert (first["data"], second["data"]) == ([7] * 200_000, [1.0, 2.0])
