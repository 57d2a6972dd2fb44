"""How a run's process and the Pythons that it starts hold frameworks to the leased memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpubroker.runtime.messages import RunOrder
from gpubroker.runtime.process import memory_limits
from gpubroker.runtime.site.gpubroker_memory_limit import FRACTIONS, LIMITS_MB

from tests.client.stand_in_torch import stand_in_for_torch

LEASES = (("GPU-a", 6_000), ("GPU-b", 24_000))
GIVEN = {FRACTIONS: "0.2292,1", LIMITS_MB: "5500,24000"}
"""Without the 500 MiB of the context."""


def limits(env: dict[str, str] | None = None, **process_env: str) -> dict[str, str]:
    """Of a run on a quarter of one GPU and all of another, which has set `env` itself."""
    order = RunOrder("t", 1, "function", leases=LEASES, env={**GIVEN, **(env or {})})
    return memory_limits(order, process_env)


def answer(script: str, *folders: Path, **env: str) -> Any:
    """What a Python says that a run with these limits starts."""
    path = os.pathsep.join([limits()["PYTHONPATH"], *map(str, folders)])
    given = {**GIVEN, "PYTHONPATH": path, **env}
    told = subprocess.run([sys.executable, "-c", script], env=given, capture_output=True, check=True)
    assert told.stderr == b""
    return json.loads(told.stdout)


def test_torch_is_limited_when_cuda_begins_unless_the_whole_gpu_is_leased(tmp_path: Path) -> None:
    stand_in_for_torch(tmp_path, lazy=True)
    script = (
        "import json, torch; before = list(torch.cuda.calls); torch.cuda.init(); "
        "print(json.dumps([before, torch.cuda.calls]))"
    )
    assert answer(script, tmp_path, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") == [[], [[0.2292, 0]]]


def test_a_torch_that_refuses_its_limit_is_used_without_it(tmp_path: Path) -> None:
    stand_in_for_torch(tmp_path)
    script = "import json, torch; print(json.dumps(torch.cuda.calls))"
    assert answer(script, tmp_path, **{FRACTIONS: "-1,0.5"}) == [[0.5, 1]]


def test_a_python_without_torch_says_that_it_has_none(tmp_path: Path) -> None:
    script = """
import importlib.util, json
try:
    import torch
except ModuleNotFoundError as fault:
    print(json.dumps([str(fault), importlib.util.find_spec("torch") is None]))
"""
    assert answer(script, tmp_path) == ["No module named 'torch'", True]


def test_sitecustomize_of_the_python_still_runs_and_ours_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['OWN'] = 'ran'")
    script = (
        "import json, os, sitecustomize, sys; "
        "print(json.dumps([os.environ['OWN'], sitecustomize.__file__, sys.path]))"
    )
    own, file, path = answer(script, tmp_path)
    assert (own, file) == ("ran", str(tmp_path / "sitecustomize.py"))
    assert not any("gpubroker/runtime/site" in folder for folder in path)


def test_jax_gets_the_smallest_share_unless_the_task_says_its_own() -> None:
    assert limits()["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.2292"
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in limits({name: "0.1"})


def test_the_python_path_of_the_run_comes_after_ours() -> None:
    assert limits(PYTHONPATH="/site")["PYTHONPATH"].endswith(f"runtime/site{os.pathsep}/site")


@pytest.mark.parametrize("runs", [True, False])
def test_mps_driver_limits_pinned_memory_beside_the_context_where_it_runs(tmp_path: Path, runs: bool) -> None:
    if runs:
        (tmp_path / "control").touch()
    limit = limits(CUDA_MPS_PIPE_DIRECTORY=str(tmp_path)).get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
    assert limit == ("0=5500M,1=24000M" if runs else None)
