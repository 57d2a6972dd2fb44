"""Several processes of one task that add up their numbers: an all-reduce without any library.

    gpubroker submit examples.gang:add_up -i number=1 --bundle count=4,cpu=0.5

Rank 0 listens at the task's address, the others connect, and all ranks get the sum.
"""

import socket
import time

from gpubroker import current_task

PATIENCE_SECONDS = 30.0
"""The longest that a rank waits for the others. All ranks start together, so one that has not connected by
then never will."""


def add_up(number: float) -> float:
    """Add up the numbers of all ranks: each rank contributes `number` times its position (1, 2, ...). The
    task's result is that of rank 0."""
    return all_reduce(number * (current_task().rank + 1))


def all_reduce(number: float) -> float:
    task = current_task()
    host, port = task.rank_zero_address.rsplit(":", 1)
    if task.rank > 0:
        with connect_with_retries((host, int(port))) as connection:
            connection.sendall(f"{number}\n".encode())
            return float(connection.makefile().readline())
    with socket.create_server((host, int(port))) as server:
        server.settimeout(PATIENCE_SECONDS)
        connections = [server.accept()[0] for _ in range(task.world_size - 1)]
        total = number + sum(float(connection.makefile().readline()) for connection in connections)
        for connection in connections:
            connection.sendall(f"{total}\n".encode())
            connection.close()
    return total


def connect_with_retries(address: tuple[str, int]) -> socket.socket:
    """Connect to rank 0, which may not listen yet. Raises ConnectionRefusedError if it does not in time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return socket.create_connection(address, timeout=PATIENCE_SECONDS)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
