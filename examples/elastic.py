"""A fit by ranks that join as workers of a cluster arrive. Each in a terminal of its own:

    gpubroker cluster start --simulated 3x24GiB
    export GPUBROKER_ENTRYPOINTS=examples.elastic:fit
    gpubroker serve --ray ADDRESS               # as the first command says
    python -m examples.elastic                  # prints each of its steps
    gpubroker cluster add-worker                # twice; a third one says that no GPU is left

One task of one to three ranks, each with a GPU. Rank 0 gives each rank at work its share of the rows in each
step, and adds up their gradients; so it is rank 0 that says in which step the ranks change.
"""

import json
import socket
import sys
import time
from typing import IO

from gpubroker import Broker, Stopped, current_task

from examples.gang import PATIENCE_SECONDS, connect_with_retries

SLOPE, OFFSET = 3.0, 1.0
ROWS = 600
RATE = 0.5


def run(broker: Broker, enough: int = 3) -> int:
    """Submit the fit and print what rank 0 does, until it has taken a step with `enough` ranks."""
    bundles = [{"count": enough, "gpus": 1}]
    task = broker.submit("examples.elastic:fit", enough, bundles=bundles, min_ranks=1, strategy="spread")
    for line in task.logs(follow=True):
        print(line, end="", flush=True)
    return int(broker.result(task))


def fit(enough: int, most_steps: int = 1000) -> int:
    """Fit a line, in each rank of the task. Rank 0 returns the number of its steps."""
    task = current_task()
    host, port = task.rank_zero_address.rsplit(":", 1)
    if task.rank > 0:
        with connect_with_retries((host, int(port))) as connection:
            return help_with(connection.makefile("rw"), task.rank)
    with socket.create_server((host, int(port))) as server:
        server.settimeout(PATIENCE_SECONDS)
        return lead(server, enough, most_steps)


def lead(server: socket.socket, enough: int, most_steps: int) -> int:
    task = current_task()
    first, slope, offset = task.resume_state or (1, 0.0, 0.0)
    streams: dict[int, IO[str]] = {}
    for step in range(first, most_steps + 1):
        if task.should_stop:
            raise Stopped
        meet(server, streams)
        began, shares = time.monotonic(), len(streams) + 1
        for share, stream in enumerate(streams.values(), start=1):
            write(stream, [slope, offset, share, shares])
        sums = [
            gradient(slope, offset, 0, shares),
            *(json.loads(stream.readline()) for stream in streams.values()),
        ]
        slope -= RATE * sum(down for down, _ in sums) / ROWS
        offset -= RATE * sum(across for _, across in sums) / ROWS
        ranks = ", ".join(map(str, sorted([0, *streams])))
        print(
            f"step {step} by rank {ranks}: y = {slope:.3f} x + {offset:.3f}, {time.monotonic() - began:.1f} s"
        )
        task.checkpoint((step + 1, slope, offset))
        if shares >= enough:
            return step
        task.wait_for_stop(1.0)
    return most_steps


def meet(server: socket.socket, streams: dict[int, IO[str]]) -> None:
    """Drop the ranks that have left, and wait for those that have joined."""
    at_work = current_task().accept_world()
    for rank in [rank for rank in streams if rank not in at_work]:
        streams.pop(rank).close()
        print(f"rank {rank} has left")
    while not streams.keys() >= {rank for rank in at_work if rank > 0}:
        connection, _ = server.accept()
        stream = connection.makefile("rw")
        rank = int(stream.readline())
        streams[rank] = stream
        print(f"rank {rank} has joined")


def help_with(leader: IO[str], rank: int) -> int:
    """Take part in the fit until rank 0 drops this rank; return the number of steps."""
    write(leader, rank)
    steps = 0
    while line := leader.readline():
        write(leader, gradient(*json.loads(line)))
        steps += 1
    return steps


def gradient(slope: float, offset: float, share: int, shares: int) -> tuple[float, float]:
    """Return the sums over every `shares`-th row, beginning with row `share`."""
    down = across = 0.0
    for row in range(share, ROWS, shares):
        x = row / ROWS
        error = slope * x + offset - (SLOPE * x + OFFSET)
        down, across = down + error * x, across + error
    return down, across


def write(stream: IO[str], value: object) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


if __name__ == "__main__":
    with Broker() as running:
        run(running, *map(int, sys.argv[1:]))
