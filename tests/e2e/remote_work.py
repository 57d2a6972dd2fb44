"""Functions whose awaited call is a task."""

import os

from gpubroker import current_task, task


@task(cpu=0.1)
async def add(a: int, b: int) -> dict[str, object]:
    """Return the sum, and where it was made."""
    return {"sum": a + b, "task": current_task().id, "pid": os.getpid()}


@task(cpu=0.1)
async def add_through_another(a: int, b: int) -> dict[str, object]:
    """Return what the awaited function returns, and the task of the caller."""
    return {**await add(a, b), "caller": current_task().id}


@task(cpu=0.1, queue_ttl_seconds=1, gpu_mb=20_000)
async def hold_and_await_another(depth: int) -> str:
    """Hold a GPU while another run of this function is awaited, which needs a GPU as well."""
    if depth == 0:
        return "done"
    return await hold_and_await_another(depth - 1)
