"""Runs that ended for lack of memory are counted by what ran out."""

import pytest
from gpubroker_server.core.control.memory_failures import MAX_COUNTED, MemoryFailureCount, memory_of
from gpubroker_server.core.domain.decisions import Decision, Outcome, write_move
from gpubroker_server.core.domain.orders import Failure
from gpubroker_server.core.domain.task import Move
from gpubroker_server.core.domain.units import Instant

from tests.builders import NOW, a_task, holding

CUDA = Failure("exception", "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB")

OF_TENSOR = "tensor with shape[9,9] and type float on /job:localhost/replica:0/task:0/device:"


def failed(name: str, failure: Failure | None = CUDA, at: float = NOW) -> Decision:
    task = holding(a_task(name)).task
    outcome = Outcome(task.id, 1, "failed", Instant(at), failure=failure)
    return Decision(task.id, "ended", tasks=(write_move(task, Move.FAILED),), outcome=outcome)


@pytest.mark.parametrize(
    ("failure", "memory"),
    [
        (CUDA, "cuda"),
        (Failure("exception", "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying"), "cuda"),
        (Failure("exception", "AcceleratorError: CUDA error: out of memory\nCUDA kernel errors"), "cuda"),
        (Failure("exception", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "cuda"),
        (Failure("exception", "OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB."), "cuda"),
        (Failure("exception", "CudaAPIError: [2] Call to cuMemAlloc in CUDA_ERROR_OUT_OF_MEMORY"), "cuda"),
        (Failure("exception", "MemoryError: std::bad_alloc: CUDA error: cudaErrorMemoryAllocation"), "cuda"),
        (Failure("exception", "OutOfMemoryError: Out of memory allocating 8,000 bytes (allocated"), "cuda"),
        (Failure("exception", f"ResourceExhaustedError: OOM when allocating {OF_TENSOR}GPU:0 by"), "cuda"),
        (Failure("exception", f"ResourceExhaustedError: OOM when allocating {OF_TENSOR}CPU:0 by"), None),
        (
            Failure(
                "exception",
                "ResourceExhaustedError: {{function_node __wrapped__Mul_device_/job:localhost/"
                "replica:0/task:0/device:GPU:0}} failed to allocate memory [Op:Mul]",
            ),
            "cuda",
        ),
        (Failure("host_memory_exceeded", "took 9 GiB"), "host"),
        (Failure("out_of_memory", "the node ran out of host memory"), "node"),
        (Failure("exception", "ValueError: no"), None),
        (None, None),
    ],
)
def test_what_ran_out_is_known_by_kind_or_by_the_frameworks_words(
    failure: Failure | None, memory: str | None
) -> None:
    assert memory_of(failure) == memory


def test_only_what_fails_again_and_again_is_named_and_only_for_a_while() -> None:
    count = MemoryFailureCount()
    count.note([failed("once"), Decision("n1", "node_seen"), failed("t", Failure("killed", "by signal 9"))])
    count.note([failed("t", at=NOW + n) for n in range(3)])
    [found] = count.often(Instant(NOW + 10))
    assert (found.memory, found.name, found.times) == ("cuda", "t", 3)
    assert (found.first_at, found.last_at) == (NOW, NOW + 2)
    assert count.often(Instant(NOW + 4000)) == ()


def test_a_failure_long_after_the_last_one_begins_anew() -> None:
    count = MemoryFailureCount()
    count.note([failed("t"), failed("t", at=NOW + 4000), failed("t", at=NOW + 4001)])
    assert count.often(Instant(NOW + 4002)) == ()


def test_it_remembers_a_bounded_number_of_names() -> None:
    count = MemoryFailureCount()
    count.note([failed("first") for _ in range(3)])
    count.note([failed(f"t{n}") for n in range(MAX_COUNTED)])
    assert count.often(NOW) == ()
