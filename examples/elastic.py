"""A fit that spreads over the workers of a cluster as they arrive. Each in a terminal of its own:

    gpubroker cluster start --simulated 3x24GiB
    gpubroker serve --ray ADDRESS               # as the first command says
    python -m examples.elastic                  # prints each of its steps
    gpubroker cluster add-worker                # twice; a third one says that no GPU is left

Each step is one task per node with a GPU; each task computes the gradient of its share of the rows.
"""

import sys
import time

from gpubroker import Broker

SLOPE, OFFSET = 3.0, 1.0
ROWS = 600
RATE = 0.5


def gradient(slope: float, offset: float, share: int, shares: int) -> tuple[float, float]:
    """Sums over every `shares`-th row. Runs in the cluster."""
    down = across = 0.0
    for row in range(share, ROWS, shares):
        x = row / ROWS
        error = slope * x + offset - (SLOPE * x + OFFSET)
        down, across = down + error * x, across + error
    return down, across


def fit(broker: Broker, enough: int = 3, most_steps: int = 1000) -> int:
    """Steps until `enough` nodes have taken part in one; how many there were."""
    slope = offset = 0.0
    known: list[str] = []
    for step in range(1, most_steps + 1):
        nodes = sorted(node.name for node in broker.nodes() if node.ready and node.gpus)
        for name in nodes:
            if name not in known:
                print(f"{name} has arrived", flush=True)
        known = nodes
        began = time.monotonic()
        shares = [
            broker.submit(gradient, slope, offset, share, len(nodes), gpus=1) for share in range(len(nodes))
        ]
        sums = [broker.result(share) for share in shares]
        slope -= RATE * sum(down for down, _ in sums) / ROWS
        offset -= RATE * sum(across for _, across in sums) / ROWS
        ran_on = sorted({str(broker.get(share).node) for share in shares})
        print(
            f"step {step} on {', '.join(ran_on)}: y = {slope:.3f} x + {offset:.3f}, "
            f"{time.monotonic() - began:.1f} s",
            flush=True,
        )
        if len(ran_on) >= enough:
            return step
    return most_steps


if __name__ == "__main__":
    with Broker() as running:
        fit(running, *map(int, sys.argv[1:]))
