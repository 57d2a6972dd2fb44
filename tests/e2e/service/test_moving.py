"""A run moves to another GPU so that another task fits, on real Ray."""

from pathlib import Path

from gpubroker import Broker, Task

from tests.e2e.service_process import GIB, until
from tests.patience import PATIENCE_SECONDS


def placed(broker: Broker) -> dict[str, list[str]]:
    """The runs on each GPU."""
    return {gpu.key: sorted(str(holder.id) for holder in gpu.holders) for gpu in broker.gpus()}


def test_run_moves_to_another_gpu_with_its_checkpoint_for_a_large_task(
    broker: Broker, tmp_path: Path
) -> None:
    enough = tmp_path / "enough"

    def counting(name: str) -> Task:
        work = {"witness": str(tmp_path / name), "enough": str(enough)}
        return broker.submit("tests.e2e.work:count", kwargs=work, gpu_mb=10 * GIB, name=name)

    runs = [counting(name) for name in "abc"]
    until(lambda: sorted(map(len, placed(broker).values())) == [1, 2], "three runs are on two GPUs")
    two = max(placed(broker).values(), key=len)
    left = [run for run in runs if run.id != two[0]]
    until(lambda: all(broker.get(run).checkpoint_at is not None for run in left), "they have saved")
    broker.cancel(two[0])
    broker.wait(two[0], timeout_seconds=PATIENCE_SECONDS)

    large = broker.submit("tests.e2e.work:add", 20, 22, gpus=1, name="large")
    assert broker.result(large, timeout_seconds=PATIENCE_SECONDS) == 42
    (moved,) = [task for task in map(broker.get, left) if task.preemptions]
    notice = next(event for event in broker.events(moved) if event.kind == "task.stopping")
    assert (notice.fields["stop_reason"], notice.fields["freeing_for"]) == ("move", large.id)
    until(lambda: broker.get(moved).state == "running", "it goes on where it went")
    enough.touch()
    for run in left:
        counted = broker.result(run, timeout_seconds=PATIENCE_SECONDS)
        steps = (tmp_path / run.name).read_text().split()
        assert steps == [str(step) for step in counted] == [str(step) for step in range(len(steps))], (
            "no step was lost, and none done twice"
        )
