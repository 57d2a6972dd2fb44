"""The baseline of `bench objects`: `ray.put` and `ray.get` on a Ray of its own, without the service."""

import time
from typing import Any

import ray

from bench.objects import an_array
from bench.plain_ray import answer_on_plain_ray
from bench.tasks import last_of

READERS: list[Any] = []


class Reader:
    def last(self, refs: list[Any]) -> float:
        """Read the last element of the array. The reference is in a list because Ray would resolve it as an
        argument."""
        return last_of(ray.get(refs[0]))


def carry_out(mb: int, reads: int) -> tuple[float, float]:
    """Return the seconds to store an array and read it once, and the seconds to read it `reads` times
    again."""
    if not READERS:
        remote_class: Any = ray.remote(num_cpus=0)(Reader)
        READERS.append(remote_class.remote())
    array = an_array(mb)
    began = time.perf_counter()
    ref = ray.put(array)
    values = [ray.get(READERS[0].last.remote([ref]))]
    first = time.perf_counter() - began
    began = time.perf_counter()
    values += ray.get([READERS[0].last.remote([ref]) for _ in range(reads)])
    seconds = first, time.perf_counter() - began
    if values != [float(array[-1])] * (reads + 1):
        raise RuntimeError(f"{len(values)} calls read an array that ends with {array[-1]}: {set(values)}")
    return seconds


if __name__ == "__main__":
    answer_on_plain_ray(carry_out)
