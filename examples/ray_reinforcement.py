"""Reinforcement learning as an ordinary Ray program. Of gpubroker it knows only the file for its reports.

    python examples/ray_reinforcement.py                                      # on this machine
    gpubroker submit --ray --bundle count=2,gpus=1,cpu=1 --strategy spread \\
        -- python examples/ray_reinforcement.py --state /shared/state.json    # on two nodes

Rollout workers play episodes with the newest weights and put them into a pool; a loader makes batches of
them; the trainer learns and hands its weights on; a validator measures them. A stop notice (SIGTERM) saves
the state, and the next attempt resumes from it.

The game is a corridor: from its middle, a step to the left or to the right, until an end. The right end is
worth 1.
"""

# Ray's decorators have no types.
# mypy: disable-error-code="unreachable,type-arg,var-annotated,no-untyped-call,attr-defined"

import argparse
import json
import math
import os
import random
import signal
import sys
from collections import deque
from pathlib import Path

import ray

PLACES, MAX_STEPS = 9, 40
EPISODES = 16
"""The episodes that each rollout worker plays in an iteration."""

Weights = list[float]
"""For each place, how much the policy prefers a step to the right."""
Episode = tuple[list[tuple[int, bool]], float]
"""The steps, each a place and whether it led to the right, and the reward."""


def play(weights: Weights, luck: random.Random) -> Episode:
    place, steps = PLACES // 2, []
    while 0 < place < PLACES - 1 and len(steps) < MAX_STEPS:
        to_right = luck.random() < probability(weights[place])
        steps.append((place, to_right))
        place += 1 if to_right else -1
    return steps, float(place == PLACES - 1)


def probability(weight: float) -> float:
    return 1 / (1 + math.exp(-weight))


@ray.remote(num_cpus=0)
class TrajectoryPool:
    def __init__(self, most: int) -> None:
        self._episodes: deque[Episode] = deque(maxlen=most)

    def add(self, episodes: list[Episode]) -> None:
        self._episodes.extend(episodes)

    def newest(self) -> list[Episode]:
        return list(self._episodes)


@ray.remote(num_cpus=0)
class WeightSync:
    """Holds the newest weights; their readers never wait for the trainer."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def put(self, weights: Weights) -> None:
        self._weights = weights

    def get(self) -> Weights:
        return self._weights


@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
class RolloutWorker:
    def __init__(self, pool: "ray.actor.ActorHandle", sync: "ray.actor.ActorHandle") -> None:
        self._pool, self._sync = pool, sync

    def roll_out(self, seed: int) -> None:
        luck, weights = random.Random(seed), ray.get(self._sync.get.remote())
        ray.get(self._pool.add.remote([play(weights, luck) for _ in range(EPISODES)]))


@ray.remote(num_cpus=0)
class DataLoader:
    """Makes batches of (place, step to the right, advantage)."""

    def __init__(self, pool: "ray.actor.ActorHandle") -> None:
        self._pool = pool

    def batch(self) -> list[tuple[int, bool, float]]:
        episodes = ray.get(self._pool.newest.remote())
        usual = sum(reward for _, reward in episodes) / len(episodes)
        return [(*step, reward - usual) for steps, reward in episodes for step in steps]


@ray.remote(num_cpus=0)
class Trainer:
    def __init__(self, weights: Weights, sync: "ray.actor.ActorHandle") -> None:
        self._weights, self._sync = weights, sync

    def learn(self, batch: list[tuple[int, bool, float]], rate: float = 4.0) -> Weights:
        for place, to_right, advantage in batch:
            slope = float(to_right) - probability(self._weights[place])
            self._weights[place] += rate * advantage * slope / len(batch)
        ray.get(self._sync.put.remote(self._weights))
        return self._weights


@ray.remote(num_cpus=0)
class Validator:
    def success(self, weights: Weights, seed: int, episodes: int = 200) -> float:
        luck = random.Random(seed)
        return sum(play(weights, luck)[1] for _ in range(episodes)) / episodes


class Run:
    """The state of a run and its file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        known = json.loads(file.read_text()) if file.exists() else {}
        self.iteration: int = known.get("iteration", 0)
        self.weights: Weights = known.get("weights", [0.0] * PLACES)
        self.success: float = known.get("success", 0.0)
        self.starts: list[int] = [*known.get("starts", []), self.iteration]

    def save(self) -> None:
        draft = self._file.with_suffix(".new")
        names = "iteration", "weights", "success", "starts"
        draft.write_text(json.dumps({name: getattr(self, name) for name in names}))
        draft.replace(self._file)
        report(f"checkpoint {self._file}")


def report(line: str) -> None:
    """Write a report for gpubroker, if it runs this program."""
    if path := os.environ.get("GPUBROKER_REPORTS"):
        with open(path, "a") as reports:
            reports.write(f"{line}\n")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--state", type=Path, default=Path("state.json"))
    options.add_argument("--iterations", type=int, default=60)
    options.add_argument("--workers", type=int, default=2)
    given = options.parse_args()
    run, stopping = Run(given.state), []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))

    ray.init()
    has_gpu = ray.cluster_resources().get("GPU", 0) >= 1
    sync = WeightSync.remote(run.weights)
    pool = TrajectoryPool.remote(2 * EPISODES * given.workers)
    loader, validator = DataLoader.remote(pool), Validator.remote()
    trainer = Trainer.options(num_gpus=int(has_gpu)).remote(run.weights, sync)
    workers = [RolloutWorker.remote(pool, sync) for _ in range(given.workers)]
    print(f"begins at iteration {run.iteration} on {len(ray.nodes())} nodes", flush=True)
    while run.iteration < given.iterations and not stopping:
        seeds = [run.iteration * given.workers + number for number in range(given.workers)]
        ray.get([worker.roll_out.remote(seed) for worker, seed in zip(workers, seeds, strict=True)])
        run.weights = ray.get(trainer.learn.remote(loader.batch.remote()))
        run.success = ray.get(validator.success.remote(run.weights, run.iteration))
        run.iteration += 1
        report(f"progress {run.iteration / given.iterations} success {run.success:.2f}")
        if run.iteration % 10 == 0:
            run.save()
    run.save()
    print(f"ends at iteration {run.iteration} with success {run.success:.2f}", flush=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
