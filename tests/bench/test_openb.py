"""`python -m bench openb` on a twentieth of the cluster."""

import random
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import openb
from bench.openb.policies import POLICIES, BestFit, policy
from bench.openb.published import published
from bench.openb.replay import Replay
from bench.openb.synthesis import synthesise
from bench.openb.trace import Job, Machine, arrivals, total_milli

GIB = 1024

MACHINES = [
    *(Machine(f"large-{number:02}", 96_000, 384 * GIB, 8, "G2") for number in range(20)),
    *(Machine(f"roomy-{number:02}", 104_000, 512 * GIB, 2, "T4") for number in range(18)),
    *(Machine(f"tight-{number:02}", 16_000, 120 * GIB, 2, "P100") for number in range(8)),
]

COUNTS = {
    Job(8_000, 30 * GIB, 1, 470): 14,
    Job(3_152, 5 * GIB, 1, 810): 12,
    Job(4_000, 15 * GIB, 1, 220): 8,
    Job(11_908, 46 * GIB, 1, 650): 5,
    Job(11_400, 47 * GIB, 1, 1000): 14,
    Job(3_152, 5 * GIB, 1, 1000): 16,
    Job(18_708, 63 * GIB, 1, 1000): 8,
    Job(12_000, 24 * GIB, 1, 1000, ("T4",)): 3,
    Job(12_500, 56 * GIB, 0, 0): 8,
    Job(32_000, 48 * GIB, 0, 0): 3,
    Job(88_000, 320 * GIB, 8, 1000): 1,
}
JOBS = [job for job, count in COUNTS.items() for _ in range(count)]


def filled(name: str, seed: int) -> float:
    chance = random.Random(seed)
    order = arrivals(JOBS, total_milli(MACHINES), chance)
    nodes = chance.sample(MACHINES, len(MACHINES))
    return Replay(nodes, policy(name, JOBS, MACHINES, chance)).allocated(order, (130,))[130]


def mean(name: str) -> float:
    return sum(filled(name, seed) for seed in range(4)) / 4


def test_fgd_fills_more_than_best_fit_and_the_service_more_than_fgd() -> None:
    assert mean("best_fit") < mean("fgd") < mean("gpubroker")


@pytest.mark.parametrize("name", POLICIES)
def test_a_replay_with_the_same_seed_gives_the_same_result(name: str) -> None:
    assert filled(name, 7) == filled(name, 7)


@pytest.mark.parametrize("name", POLICIES)
def test_no_gpu_is_overbooked_and_kinds_are_respected(name: str) -> None:
    chance = random.Random(1)
    replay = Replay(MACHINES, policy(name, JOBS, MACHINES, chance))
    taken = Counter[Any]()
    for job in arrivals(JOBS, total_milli(MACHINES), chance):
        where = replay.place(job)
        if where is not None:
            assert not job.kinds or where.startswith("roomy")
            taken[where] += job.total_milli
    assert sum(taken.values()) == replay.allocated_milli
    for node in replay.nodes:
        assert node.room.cpu >= 0
        assert node.memory_mb >= 0
        assert min(node.room.left) >= 0
        assert sum(node.room.left) == 1000 * node.machine.gpus - taken[node.machine.name]


@pytest.mark.parametrize("name", ["best_fit", "fgd", "gpubroker"])
def test_of_equal_nodes_the_first_wins(name: str) -> None:
    twins = [Machine(f"twin-{number}", 8_000, GIB, 2, "T4") for number in range(3)]
    jobs = [Job(1_000, 1, 1, 1000)]
    assert Replay(twins, policy(name, jobs, twins, random.Random(0))).place(jobs[0]) == "twin-0"


def test_a_node_without_enough_host_memory_is_skipped() -> None:
    poor, rich = Machine("a", 8_000, 4, 1, "T4"), Machine("b", 8_000, 64, 1, "T4")
    assert Replay([poor, rich], BestFit()).place(Job(1_000, 8, 1, 500)) == "b"


def test_tasks_arrive_until_the_next_would_pass_130_percent() -> None:
    order = arrivals(JOBS, total_milli(MACHINES), random.Random(3))
    assert set(order[: len(JOBS)]) == set(JOBS)
    asked = sum(job.total_milli for job in order)
    assert 1.25 <= asked / total_milli(MACHINES) <= 1.34


def test_an_overfull_trace_loses_tasks_until_130_percent_are_left() -> None:
    order = arrivals(JOBS * 9, 20_000, random.Random(3))
    assert 15_000 <= sum(job.total_milli for job in order) <= 26_000


def test_synthetic_families_have_the_shares_in_their_names() -> None:
    def part(family: str, chosen: Callable[[Any], bool]) -> float:
        jobs = [job for job in synthesise(family, JOBS * 20) if job.gpus]
        return sum(job.total_milli for job in jobs if chosen(job)) / sum(job.total_milli for job in jobs)

    cpu = synthesise("cpu200", JOBS * 20)
    assert sum(not job.gpus for job in cpu) / len(cpu) == pytest.approx(0.2, abs=0.01)
    assert part("gpushare60", lambda job: job.gpu_milli < 1000) == pytest.approx(0.6, abs=0.02)
    assert part("multigpu40", lambda job: job.gpus > 1) == pytest.approx(0.4, abs=0.02)
    picky = [job for job in synthesise("gpuspec33", [job for job in JOBS * 20 if not job.kinds]) if job.gpus]
    assert sum(bool(job.kinds) for job in picky) / len(picky) == pytest.approx(0.33, abs=0.05)
    assert synthesise("gpuspec33", JOBS) == synthesise("gpuspec33", JOBS)
    with pytest.raises(ValueError, match="no such family"):
        synthesise("gpuspec", JOBS)


def write_data(folder: Path) -> None:
    nodes = [f"{m.name},{m.cpu_milli},{m.memory_mb},{m.gpus},{m.kind}" for m in MACHINES]
    (folder / openb.trace.NODES).write_text("\n".join(["sn,cpu_milli,memory_mib,gpu,model", *nodes]))
    head = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec"
    tasks = [f"t,{j.cpu_milli},{j.memory_mb},{j.gpus},{j.gpu_milli},{'|'.join(j.kinds)}" for j in JOBS]
    (folder / "openb_pod_list_default.csv").write_text("\n".join([head, *tasks]))
    (folder / "openb_pod_list_old.csv").write_text(
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli\nt,1000,1,1,500\nt,1000,1,2,1000\n"
    )


def measured(data: Path, *words: str) -> list[Any]:
    parser = ArgumentParser()
    openb.add_options(parser)
    options = parser.parse_args(["--data", str(data), "--seeds", "2", "--processes", "1", *words])
    return list(openb.measure(options))


def test_figures_have_the_published_values_as_baselines(tmp_path: Path) -> None:
    write_data(tmp_path)
    found = measured(tmp_path, "--traces", "default", "--policies", "fgd,gpubroker", "--arrival", "130,100")
    names = [figure.figure for figure in found]
    assert names == [f"openb.default.{name}{at}" for at in ("", ".at100") for name in ("fgd", "gpubroker")]
    assert [figure.baseline for figure in found] == [95.39, 95.39, 95.23, 95.23]
    assert all(figure.n == 2 and figure.ratio == figure.value / figure.baseline for figure in found)


def test_without_a_name_every_trace_in_the_folder_is_replayed(tmp_path: Path) -> None:
    write_data(tmp_path)
    found = measured(tmp_path, "--policies", "best_fit", "--synthesise", "cpu250")
    assert [f.figure for f in found] == [
        "openb.default.best_fit",
        "openb.old.best_fit",
        "openb.synthetic-cpu250.best_fit",
    ]
    assert [f.baseline for f in found] == [93.08, None, 91.45]


def test_several_kinds_in_one_cell_are_alternatives(tmp_path: Path) -> None:
    row = {
        "cpu_milli": "1",
        "memory_mib": "1",
        "num_gpu": "1",
        "gpu_milli": "50",
        "gpu_spec": "V100M32|V100M16|T4",
    }
    assert openb.trace.job_of(row).kinds == ("T4", "V100M16", "V100M32")
    assert openb.trace.job_of({**row, "num_gpu": "0"}) == Job(1, 1, 0, 0)


def test_values_that_were_not_looked_up_have_no_baseline() -> None:
    assert published("default", "gpubroker", 130) == published("default", "fgd", 130) == 95.39
    assert published("cpu250", "fgd", 100) is None
    assert published("default", "fgd", 95) is None
