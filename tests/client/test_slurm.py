"""The script that has Slurm start and end nodes, with stand-ins that write down how they were called."""

import json
import os
import subprocess
from pathlib import Path

from tests.e2e.service_process import ROOT

CALLED = 'echo "${0##*/} $*" >> called'


def a_demand(*spare: str) -> str:
    return json.dumps({"unmet": {"gpus": 0}, "spare": {"nodes": [{"name": name} for name in spare]}})


def test_a_spare_node_is_closed_first_and_goes_on_if_it_got_work_meanwhile(tmp_path: Path) -> None:
    answers = (a_demand("local", "slurm-7", "slurm-8"), a_demand("local", "slurm-8"))
    for number, answer in enumerate(answers):
        (tmp_path / f"demand{number}").write_text(answer)
    answer = "if [ -e demand0 ]; then cat demand0; rm demand0; else cat demand1; fi"
    programs = {"squeue": "", "sbatch": CALLED, "scancel": CALLED}
    programs["gpubroker"] = f"{CALLED}\nif [ $1 = demand ]; then {answer}; fi"
    for name, does in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    script = str(ROOT / "deploy/slurm/gpubroker-scale.sh")
    subprocess.run([script], cwd=tmp_path, env={**os.environ, "PATH": path}, check=True, timeout=60)
    assert (tmp_path / "called").read_text().splitlines() == [
        "gpubroker demand --waited 30s -o json",
        "gpubroker cordon slurm-7 --because Slurm ends it",
        "gpubroker cordon slurm-8 --because Slurm ends it",
        "gpubroker demand -o json",
        "gpubroker uncordon slurm-7",
        "scancel 8",
    ]
