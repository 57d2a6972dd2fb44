"""Which GPUs each node of a cluster on one machine gets, and what is said when there are too few."""

from collections.abc import Callable
from pathlib import Path

import pytest
from gpubroker_server.adapters.ray.cluster.layout import ClusterGpu, ClusterLayout
from gpubroker_server.adapters.ray.cluster.local_cluster import (
    ClusterRefused,
    add_worker,
    status,
    stop_cluster,
)
from gpubroker_server.adapters.ray.head.head import HeadState, write_state
from gpubroker_server.bootstrap.clusters import keep, layout_of
from msgspec.structs import replace

REAL = tuple(ClusterGpu(index, f"GPU-{index}") for index in range(4))


def asked(name: str = "local", workers: int = 0, simulated: str = "4x24GiB") -> ClusterLayout:
    return layout_of(name, workers, 1, simulated, 1, 1.0, 128, 0)


def test_the_head_has_the_first_gpus_and_each_worker_the_next() -> None:
    layout = ClusterLayout("local", workers=1, gpus=REAL, gpus_per_node=2)
    assert not layout.lacking
    head, worker = (layout.node(number, "" if number == 0 else "127.0.0.1:1", None) for number in (0, 1))
    assert (head.name, head.gpus, head.env["GPUBROKER_NODE_GPUS"]) == ("head", 2, "[0, 1]")
    assert (worker.name, worker.env["CUDA_VISIBLE_DEVICES"]) == ("worker-1", "GPU-2,GPU-3")
    assert (worker.cpus, worker.resources) == (1, {"worker_unit": 1.0})


def test_a_simulated_gpu_takes_no_real_one() -> None:
    node = asked(simulated="2x1GiB").node(1, "127.0.0.1:1", None)
    assert node.env == {"GPUBROKER_NODE_GPUS": '[["GPU-sim-local-1", 1, 1024]]'}


def test_too_few_gpus_for_the_workers_are_refused_with_what_to_do() -> None:
    told = replace(asked(workers=4), gpus=REAL).lacking
    assert told.startswith(
        "the head and 4 workers need 5 GPUs, 1 each, and there are 4; use a machine with more"
    )
    assert "--simulated 5x24GiB" in told
    assert asked(workers=4).lacking.endswith("more simulated ones: --simulated 5x24576MiB")


def test_a_new_worker_takes_the_lowest_free_number_until_no_gpu_is_left() -> None:
    layout = asked()
    assert layout.next_worker([]) == 1
    assert layout.next_worker([1, 3]) == 2
    told = layout.next_worker([1, 2, 3])
    assert isinstance(told, str)
    assert "no GPU is left for worker-4: the head and 3 workers have 1 each" in told


def test_nodes_without_gpus_may_be_any_number() -> None:
    layout = ClusterLayout("local", workers=7, gpus=(), gpus_per_node=0)
    assert not layout.lacking
    assert layout.next_worker(range(1, 8)) == 8
    assert layout.node(8, "127.0.0.1:1", None).env["CUDA_VISIBLE_DEVICES"] == ""


def test_a_layout_travels_as_json() -> None:
    layout = asked(workers=2)
    assert ClusterLayout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize("given", ["3", "3x", "x24GiB", "3xmany"])
def test_a_wrong_count_of_simulated_gpus_is_refused(given: str) -> None:
    with pytest.raises(ClusterRefused, match="write how many and how large, such as 3x24GiB"):
        asked(simulated=given)


@pytest.mark.parametrize("name", ["", "..", "../x", "A", "a" * 32])
@pytest.mark.parametrize("command", ["start", "add-worker", "status", "stop"])
def test_a_name_that_is_no_folder_of_a_cluster_is_refused(tmp_path: Path, command: str, name: str) -> None:
    """`stop` would remove what else has a state file there: the data directory of a service."""
    kept = tmp_path / "gpubroker.db"
    kept.write_text("tasks")
    (tmp_path / "clusters").mkdir()
    write_state(tmp_path, HeadState(2**22 + 1, 0, "", "127.0.0.1:1", str(tmp_path / "ray"), "", ""))
    commands: dict[str, Callable[[], object]] = {
        "start": lambda: keep(tmp_path, asked(name=name), print),
        "add-worker": lambda: add_worker(tmp_path, name),
        "status": lambda: status(tmp_path, name),
        "stop": lambda: stop_cluster(tmp_path, name),
    }
    with pytest.raises(ClusterRefused, match="use a to z, digits and -"):
        commands[command]()
    assert kept.exists()
