"""A secret on its way to a run, on real Ray and a real disk: nothing else keeps it."""

import hashlib
import secrets
from pathlib import Path

import pytest
from gpubroker import Broker, TaskFailed
from gpubroker_server.adapters.ray.head.head import read_state

from tests.e2e.hands import Hands
from tests.e2e.ray_lab import command_lines
from tests.e2e.service_process import ServiceProcess
from tests.patience import PATIENCE_SECONDS

DIGEST = "tests.e2e.work:digest_of_variable"


def places_with(text: str, *folders: Path) -> set[str]:
    """Files that have this text."""
    return {
        str(path)
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and text.encode() in path.read_bytes()
    }


def test_a_run_gets_the_secret_and_no_file_row_log_or_command_line_has_it(service: ServiceProcess) -> None:
    text, broker = secrets.token_hex(20), service.broker
    broker.set_secret("WANDB", text)
    task = broker.submit(DIGEST, "WANDB_KEY", env={"WANDB_KEY": "secret:WANDB"}, gpu_mb=1000)
    expected = hashlib.sha256(text.encode()).hexdigest()
    assert broker.result(task, timeout_seconds=PATIENCE_SECONDS) == {"process": expected, "child": expected}
    head = read_state(service.data_dir)
    assert head is not None
    kept = service.data_dir / "blobs" / "secrets" / "default" / "WANDB"
    assert places_with(text, service.data_dir, Path(head.temp_dir)) == {str(kept)}
    assert text not in service.log()
    assert not command_lines(text)
    assert text not in str(broker.get(task).raw)


def test_a_secret_that_is_deleted_while_its_task_waits_fails_the_start(
    broker: Broker, tmp_path: Path
) -> None:
    broker.set_secret("SOON_GONE", "text")
    holder = Hands(broker, tmp_path).at_work("holder", gpus=2)
    task = broker.submit(DIGEST, "KEY", env={"KEY": "secret:SOON_GONE"}, gpus=1, max_retries=3)
    broker.delete_secret("SOON_GONE")
    broker.cancel(holder, grace_seconds=0)
    with pytest.raises(TaskFailed, match="gpubroker secrets set SOON_GONE"):
        broker.result(task, timeout_seconds=PATIENCE_SECONDS)
    error = broker.get(task).error
    assert error is not None
    assert error.kind == "secret_missing"
