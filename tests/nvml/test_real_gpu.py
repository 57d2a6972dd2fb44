"""What `test_agent.py` shows on a stand-in, on a real card: `make gpu`.

Needs a machine with an NVIDIA GPU and its driver (510 or later), on which no other program begins or ends to
use the first GPU meanwhile, and the process ids of the driver: no container, or one with `--pid host`.
`make gpu` installs torch into `.tools/torch`; the processes that use the GPU run with it. What was measured
goes to `evidence/gpu-<kind>.json`.
"""

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml
import pytest
from gpubroker.runtime.messages import RunKey, ended, failed
from gpubroker_server.adapters.nvml.probe import shares_pids

from tests.chaos.evidence import FOLDER, ROOT, commit
from tests.contracts.fake_runners import FakeRunners, Leader, a_leader
from tests.nvml.heard import core_report, inventory, next_samples, of_uuid

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PYTHON = ROOT / ".tools" / "torch" / "bin" / "python"
HOLDS = """
import sys, torch
held = torch.empty(int(sys.argv[1]) * 2**20, dtype=torch.uint8, device="cuda:0")
torch.cuda.synchronize()
print("holds", flush=True)
sys.stdin.read()
"""
MB = 1000
MAX_CONTEXT_MB = 2000
"""A CUDA context takes less."""
NOISE_MB = 64

Facts = dict[str, Any]


@pytest.fixture(scope="module")
def facts(request: pytest.FixtureRequest) -> Iterator[Facts]:
    """What the tests measured; kept if all of them have passed."""
    assert shares_pids(), (
        "the driver's process ids are others here: run on the machine itself, or with --pid host"
    )
    pynvml.nvmlInit()
    kind = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    facts: Facts = {"kind": kind, "driver": pynvml.nvmlSystemGetDriverVersion(), "commit": commit()}
    failed_before = request.session.testsfailed
    yield facts
    if request.session.testsfailed == failed_before:
        name = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
        (FOLDER / f"gpu-{name}.json").write_text(json.dumps(facts, indent=1) + "\n")


@pytest.fixture
async def leader(facts: Facts, runners: FakeRunners, tmp_path: Path) -> Leader:
    """Of an agent that has announced the real GPUs."""
    leader = a_leader(runners, tmp_path, devices=None, sample_period_seconds=0.2)
    await leader.announce()
    return leader


async def first_gpu(leader: Leader) -> str:
    return (await inventory(leader)).devices[0].uuid


@contextmanager
def a_process_that_holds(mb: int, uuid: str) -> Iterator["subprocess.Popen[bytes]"]:
    """On this GPU, besides its context."""
    with subprocess.Popen(
        [PYTHON, "-c", HOLDS, str(mb)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        yield process
        process.kill()


def is_its_use(mb: int | None) -> bool:
    return mb is not None and MB <= mb <= MB + MAX_CONTEXT_MB


async def test_every_gpu_is_announced_as_nvidia_smi_shows_it(leader: Leader, facts: Facts) -> None:
    asked = ["nvidia-smi", "--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits"]
    shown = await asyncio.to_thread(subprocess.check_output, asked, text=True)
    rows = [row.split(", ") for row in shown.splitlines()]
    whole = [device for device in (await inventory(leader)).devices if not device.parent]
    assert [(device.uuid, device.kind) for device in whole] == [(uuid, kind) for uuid, kind, _ in rows]
    for device, (_, _, total_mb) in zip(whole, rows, strict=True):
        assert 0.95 * int(total_mb) <= device.physical_mb <= int(total_mb)
    facts["physical_mb"] = [device.physical_mb for device in whole]


async def test_memory_of_a_process_without_a_lease_is_foreign(leader: Leader, facts: Facts) -> None:
    uuid = await first_gpu(leader)
    before = (await next_samples(leader))[uuid]
    with a_process_that_holds(MB, uuid):
        during = (await next_samples(leader))[uuid]
    assert before.foreign_mb is not None
    assert during.foreign_mb is not None
    assert is_its_use(during.foreign_mb - before.foreign_mb), (before, during)
    assert is_its_use(during.used_mb - before.used_mb), (before, during)
    facts["foreign_mb"] = during.foreign_mb - before.foreign_mb


async def test_memory_of_an_external_leases_process_is_the_leases(leader: Leader) -> None:
    uuid = await first_gpu(leader)
    before = (await next_samples(leader))[uuid]
    with a_process_that_holds(MB, uuid) as process:
        await leader.order("watch", "task_lease", 1, 0, process.pid, ((uuid, 4000),))
        during = (await next_samples(leader))[uuid]
    assert is_its_use(during.by_holder.get("task_lease:1")), during
    assert during.foreign_mb == before.foreign_mb


async def test_memory_of_a_run_is_attributed_to_it_and_measured_free_at_its_end(
    leader: Leader, runners: FakeRunners, facts: Facts
) -> None:
    uuid = await first_gpu(leader)
    before = (await next_samples(leader))[uuid]
    with a_process_that_holds(MB, uuid) as process:
        runners.on_start = lambda runner: runner.become(process)
        await leader.start("run", leases=((uuid, 4000),))
        await leader.until(lambda: "run" in runners.started)
        during = (await next_samples(leader))[uuid]
        assert is_its_use(during.by_holder.get("run:1")), during
        assert during.foreign_mb == before.foreign_mb
        runners.runner_of("run").report(ended(RunKey("run", 1, 0), failed("exception", "no"), b""))
        gone = core_report(await leader.receive("gone", "run"))
        assert process.poll() is not None
    after = of_uuid(gone)[uuid]
    assert (gone.proof, after.by_holder) == ("process_absent", {})
    assert abs(after.used_mb - before.used_mb) <= NOISE_MB, (before, after)
    facts["run_mb"] = during.by_holder["run:1"]
    facts["used_mb_before_and_after"] = [before.used_mb, after.used_mb]
