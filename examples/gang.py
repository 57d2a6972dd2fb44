"""Several processes of one task that add up what each of them has: an all-reduce without any library.

    gpubroker submit examples.gang:add_up -i number=1 --bundle count=4,cpu=0.5

Rank 0 listens where the task says that it can, the others come, and everybody has the sum.
"""

import socket
import time

from gpubroker import current_task

PATIENCE_SECONDS = 30.0
"""All ranks begin together: who is not there by then will not come."""


def add_up(number: float) -> float:
    """Each rank gives `number` times its place (1, 2, ...); the result of the task is rank 0's."""
    return all_reduce(number * (current_task().rank + 1))


def all_reduce(number: float) -> float:
    task = current_task()
    host, port = task.rank_zero_address.rsplit(":", 1)
    if task.rank > 0:
        with connect_until_somebody_listens((host, int(port))) as line:
            line.sendall(f"{number}\n".encode())
            return float(line.makefile().readline())
    with socket.create_server((host, int(port))) as server:
        server.settimeout(PATIENCE_SECONDS)
        lines = [server.accept()[0] for _ in range(task.world_size - 1)]
        total = number + sum(float(line.makefile().readline()) for line in lines)
        for line in lines:
            line.sendall(f"{total}\n".encode())
            line.close()
    return total


def connect_until_somebody_listens(place: tuple[str, int]) -> socket.socket:
    """Rank 0 may not be there yet. Raises ConnectionRefusedError if it does not come."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return socket.create_connection(place, timeout=PATIENCE_SECONDS)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
