"""What an agent writes into the kernel files of a cgroup. A folder stands for them."""

from pathlib import Path

import pytest
from gpubroker.runtime.messages import RunOrder
from gpubroker_server.adapters.ray.agent.memory_cgroups import MemoryCgroups

ORDER = RunOrder("01J", 3, kind="command", memory_mb=512)


def a_machine(folder: Path, controllers: str, cgroup: str = "0::/services/agent\n") -> MemoryCgroups:
    (folder / "services" / "agent").mkdir(parents=True)
    (folder / "services" / "cgroup.subtree_control").write_text(controllers)
    own = folder / "own"
    own.write_text(cgroup)
    return MemoryCgroups(folder, own)


def test_a_run_gets_a_cgroup_beside_the_agents_with_its_limit(tmp_path: Path) -> None:
    groups = a_machine(tmp_path, "cpu memory pids\n")
    groups.hold(ORDER, 1234)
    group = tmp_path / "services" / "gpubroker-01J-3-0"
    found = {path.name: path.read_text() for path in group.iterdir()}
    assert found == {"memory.max": str(512 * 2**20), "memory.oom.group": "1", "cgroup.procs": "1234"}
    assert groups.breach_of(ORDER) == ""
    (group / "memory.events").write_text("low 0\nmax 7\noom 1\noom_kill 1\n")
    assert "more host memory than the 512 MiB" in groups.breach_of(ORDER)


def test_a_released_run_leaves_no_cgroup(tmp_path: Path) -> None:
    groups = a_machine(tmp_path, "memory\n")
    group = tmp_path / "services" / "gpubroker-01J-3-0"
    group.mkdir()  # the kernel's own files do not keep it
    groups.release(ORDER.key)
    assert not group.exists()


@pytest.mark.parametrize(
    ("controllers", "cgroup"),
    [("cpu pids\n", "0::/services/agent\n"), ("memory\n", "4:memory:/services/agent\n")],
)
def test_where_memory_is_not_controlled_nothing_is_made(
    tmp_path: Path, controllers: str, cgroup: str
) -> None:
    groups = a_machine(tmp_path, controllers, cgroup)
    groups.hold(ORDER, 1234)
    groups.release(ORDER.key)
    assert groups.breach_of(ORDER) == ""
    assert list(tmp_path.rglob("gpubroker-*")) == []
