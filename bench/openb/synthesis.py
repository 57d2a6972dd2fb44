"""Traces like those of the paper's families, derived from the default trace.

The families differ from the default trace as counted in the published files. `cpuNNN` has NN.N % CPU-only
tasks. In `gpushareNN` tasks that share a GPU request NN % of all GPUs, with the same number of GPU tasks.
`multigpuNN` has tasks with several GPUs added until they request NN %. In `gpuspecNN` NN % of the GPU tasks
name the kinds they need; kinds are drawn with the frequencies of two excerpts of gpuspec33, about 120 tasks.
"""

import random
import re
from collections.abc import Sequence

from bench.openb.trace import WHOLE_GPU, Job

ANY_V100 = ("V100M16", "V100M32")
NO_G3 = ("G2", "P100", "T4", *ANY_V100)
SHARED_KINDS = {("T4",): 38, ("P100",): 13, NO_G3: 2}
WHOLE_KINDS = {
    ("T4",): 25,
    ANY_V100: 17,
    ("G2",): 13,
    ("P100", *ANY_V100): 5,
    ("G3",): 3,
    ("P100", "T4", *ANY_V100): 2,
    NO_G3: 1,
    ("V100M32",): 1,
}
EIGHT_KINDS = {kinds: n for kinds, n in WHOLE_KINDS.items() if {"G2", "G3", "V100M32"} & set(kinds)}


def synthesise(family: str, default: Sequence[Job]) -> list[Job]:
    """Return the trace of this family, which is always the same. Raises ValueError for an unknown family."""
    match = re.fullmatch(r"(cpu|gpushare|multigpu|gpuspec)(\d+)", family)
    if match is None:
        raise ValueError(f"no such family: {family!r}; families: cpuNNN, gpushareNN, multigpuNN, gpuspecNN")
    name, number = match[1], int(match[2])
    make = {"cpu": more_cpu, "gpushare": more_shared, "multigpu": more_multi, "gpuspec": more_with_kinds}[
        name
    ]
    return make(default, number / (1000 if name == "cpu" else 100), random.Random(family))


def more_cpu(default: Sequence[Job], part: float, chance: random.Random) -> list[Job]:
    gpu = [job for job in default if job.gpus]
    count = round(len(gpu) * part / (1 - part))
    return chance.choices([job for job in default if not job.gpus], k=count) + gpu


def more_shared(default: Sequence[Job], part: float, chance: random.Random) -> list[Job]:
    shared = [job for job in default if shares(job)]
    whole = [job for job in default if job.gpus and not shares(job)]
    per_shared, per_whole = mean_milli(shared), mean_milli(whole)
    both = len(shared) + len(whole)
    count = round(both * part * per_whole / (per_shared * (1 - part) + per_whole * part))
    cpu = [job for job in default if not job.gpus]
    return cpu + chance.choices(shared, k=count) + chance.choices(whole, k=both - count)


def more_multi(default: Sequence[Job], part: float, chance: random.Random) -> list[Job]:
    multi = [job for job in default if job.gpus > 1]
    made = [job for job in default if job.gpus < 2]
    missing = sum(job.total_milli for job in made) * part / (1 - part)
    while missing > 0:
        made.append(chance.choice(multi))
        missing -= made[-1].total_milli
    return made


def more_with_kinds(default: Sequence[Job], part: float, chance: random.Random) -> list[Job]:
    return [with_kinds(job, chance) if job.gpus and chance.random() < part else job for job in default]


def with_kinds(job: Job, chance: random.Random) -> Job:
    kinds = SHARED_KINDS if shares(job) else EIGHT_KINDS if job.gpus == 8 else WHOLE_KINDS
    return job._replace(kinds=chance.choices(list(kinds), list(kinds.values()))[0])


def shares(job: Job) -> bool:
    return job.gpus == 1 and job.gpu_milli < WHOLE_GPU


def mean_milli(jobs: Sequence[Job]) -> float:
    return sum(job.total_milli for job in jobs) / len(jobs)
