"""`gpubroker progress`, `checkpoint` and `complete` inside a command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpubroker.run_reports import REPORTS_VARIABLE, Checkpoint, Complete, Progress, Said, read_line

from tests.client.command_line import Run, command_line
from tests.client.test_runtime_command import Hosted

GPUBROKER = f'{sys.executable} -c "from gpubroker.cli import main; main()"'


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return command_line(monkeypatch, capsys)


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "reports"
    file.touch()
    monkeypatch.setenv(REPORTS_VARIABLE, str(file))
    return file


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("progress 0.5", Progress(0.5, "")),
        ("progress 1.0000001 done", Progress(1.0, "done")),
        ("progress  0.25   epoch 1 of 4 ", Progress(0.25, "epoch 1 of 4")),
        ("progress warming up", Progress(None, "warming up")),
        ("checkpoint", Checkpoint(None)),
        ("checkpoint s3://bucket/step 3", Checkpoint("s3://bucket/step 3")),
        (" complete\r", Complete()),
    ],
)
def test_a_line_says(line: str, said: Said) -> None:
    assert read_line(line) == said


@pytest.mark.parametrize(
    "line", ["", "progress", "progress nan", "progress 2", "complete 1", "completed", "Progress 0.5"]
)
def test_a_line_that_says_nothing_known_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="found"):
        read_line(line)


def test_the_commands_of_a_real_run_reach_it(tmp_path: Path) -> None:
    saved = tmp_path / "step 3"
    saved.touch()
    script = f"cd {tmp_path}; {GPUBROKER} progress 0.5 epoch 1; {GPUBROKER} checkpoint 'step 3'"
    run = Hosted(f"trap '{GPUBROKER} complete; exit 0' TERM; {script}; while :; do sleep 0.02; done")
    assert run.next("progressed")[5:] == (0.5, "epoch 1")
    assert run.next("checkpointed")[7:] == (None, str(saved))
    run.host.stop(run.key)
    assert json.loads(run.next("ended")[6]) == {"exit_code": 0, "completed": True}


@pytest.mark.parametrize("option", ["", "--"])
def test_words_are_written_as_one_line(run: Run, reports: Path, option: str) -> None:
    """With an option the command line's own parser reads them."""
    assert run(f"progress {option} 0.5 epoch", "one\nof two").code == 0
    assert run(f"complete {option}").code == 0
    assert reports.read_text() == "progress 0.5 epoch one of two\ncomplete\n"


def test_a_place_that_is_a_file_here_is_named_in_full(
    run: Run, reports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step-3").touch()
    monkeypatch.chdir(tmp_path)
    for uri in ("step-3", "s3://bucket/step-3", "not-here"):
        assert run("checkpoint", uri).code == 0
    written = [line.removeprefix("checkpoint ") for line in reports.read_text().splitlines()]
    assert written == [f"{tmp_path}/step-3", "s3://bucket/step-3", "not-here"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("progress 50", "from 0 to 1; found 50.0"),
        ("complete now", "found 'complete now'"),
        (f"progress {'x' * 5000}", "less than 4096 bytes"),
    ],
)
def test_what_the_run_could_not_read_is_refused_where_it_is_said(
    run: Run, reports: Path, words: str, why: str
) -> None:
    ended = run(words)
    assert (ended.code, reports.read_text()) == (2, "")
    assert why in ended.err


def test_outside_of_a_run_it_says_where_it_works(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REPORTS_VARIABLE, raising=False)
    ended = run("complete")
    assert ended.code == 2
    assert "works inside a command that gpubroker runs" in ended.err


def test_a_pipe_that_nobody_reads_is_refused_at_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "left")
    monkeypatch.setenv(REPORTS_VARIABLE, str(tmp_path / "left"))
    ended = run("complete")
    assert ended.code == 2
    assert "has the run ended?" in ended.err


def test_to_report_loads_no_library(reports: Path) -> None:
    program = "import sys; sys.argv[1:] = ['complete']\nfrom gpubroker.cli import main\n"
    program += "try: main()\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert not {"typer", "cloudpickle", "httpx", "gpubroker.runtime"} & {*done.stdout.split()}
    assert reports.read_text() == "complete\n"
