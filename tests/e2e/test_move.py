"""A service moves from its file to PostgreSQL, and what runs meanwhile does not notice."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.bootstrap.refusals import refusal
from tests.chaos.forked import ForkedServiceOnRay
from tests.e2e.service_process import ROOT, ServiceProcess, environment, until
from tests.patience import PATIENCE_SECONDS


def migrate_data(data_dir: Path, *words: str) -> Sequence[str]:
    """What it said; it must have moved everything."""
    command = [sys.executable, "-m", "gpubroker_server", "migrate-data", "--data-dir", str(data_dir), *words]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr.splitlines()


def test_a_run_goes_on_while_its_service_moves_and_its_end_is_accepted(
    tmp_path: Path, empty_postgres_url: str
) -> None:
    witness, flag = tmp_path / "witness", tmp_path / "flag"
    home, work = tmp_path / "data", {"witness": str(witness), "until": str(flag)}
    ray = {"spares": 1, "warm_runners": 1}
    with ForkedServiceOnRay(home, ray=ray) as on_file:
        broker = on_file.broker
        finished = broker.submit("tests.e2e.work:add", 2, 3, cpu=0.1)
        assert broker.result(finished.id) == 5
        running = broker.submit("tests.e2e.work:hold", kwargs=work, gpu_mb=20_000, gpus=2)
        pending = broker.submit("tests.e2e.work:hold", kwargs=work, gpu_mb=20_000, idempotency_key="a-key")
        until(witness.exists, "the run has begun")
        broker.create_token("ci", scopes=["tasks:read"])
        assert on_file.terminate() == 0

        flag.touch()
        migrate_data(home, "--from", f"sqlite:///{home / 'gpubroker.db'}", "--to", empty_postgres_url)

        # With other settings: the agent that alone knows how the run ended tells that, and then makes room.
        ray |= {"max_runs": 7}
        with ForkedServiceOnRay(home, ray=ray, database_url=empty_postgres_url) as on_server:
            broker = on_server.broker
            for task in (running, pending):
                assert broker.result(task.id, timeout_seconds=PATIENCE_SECONDS) == 1
            assert len(witness.read_text(encoding="utf-8").splitlines()) == 2
            assert broker.get(running.id).attempt == 1
            assert broker.result(finished.id) == 5
            again = broker.submit("tests.e2e.work:hold", kwargs=work, gpu_mb=20_000, idempotency_key="a-key")
            assert again.id == pending.id
            assert {token.name for token in broker.tokens()} == {"admin", "ci"}
            until(lambda: [n.runs.limit for n in broker.nodes()] == [7], "its agent has other settings")
            until(lambda: all(gpu.leased_mb == 0 for gpu in broker.gpus()), "all memory is free again")
        assert "has been moved to" in refusal(ServiceProcess(home, engine="simulated"))
