"""What a run is given, and what comes back of it, on real Ray."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from gpubroker_server.adapters.ray.processes import exit_status_of
from gpubroker_server.core.domain.orders import Checkpointed, Ended, Ending, Gone, Progressed, Started
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.ports.task_objects import ObjectPart, PartAnswer

from tests.client.stand_in_torch import stand_in_for_torch
from tests.e2e.ray_lab import PROCESS_MB, Lab, eventually, guest_environment, is_there
from tests.e2e.service_process import ROOT
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="session")

SHARED = {"shareable": True}
FUNCTION = {"kind": "function", **SHARED}
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.mark.parametrize("shareable", [True, False])
@pytest.mark.parametrize("name", ["add", "add_slowly"])
async def test_an_entrypoint_returns_its_result_as_json(lab: Lab, name: str, shareable: bool) -> None:
    run = await lab.start(name, 2, 3, shareable=shareable)
    assert await run.result() == 5
    gone = await run.first(Gone)
    assert gone.proof == ("shared_process" if shareable else "process_absent")
    assert run.order_of_kinds() == ["Started", "Ended", "Gone"]


async def test_pickled_function_runs_and_its_pickled_result_returns_unopened(lab: Lab) -> None:
    factor = 3
    function = cloudpickle.dumps((lambda xs: {x * factor for x in xs}, ([1, 2],), {}))
    run = await lab.start(kind="function", arguments=function, python=PYTHON, result_format="cloudpickle")
    ended = await run.first(Ended)
    assert ended.result_format == "cloudpickle"
    assert ended.result is not None
    assert cloudpickle.loads(ended.result) == {3, 6}


async def test_command_runs_without_a_shell_in_its_directory_and_environment(lab: Lab) -> None:
    command = (sys.executable, "-c", "import os; print(os.environ['GREETING'], os.getcwd(), '$HOME')")
    run = await lab.start(
        kind="command", command=command, env={"GREETING": "hi"}, working_directory="/usr", arguments=b""
    )
    assert await run.result() == {"exit_code": 0}
    assert (await run.first(Ended)).log_tail == b"hi /usr $HOME\n"


async def test_a_run_sees_its_devices_by_uuid_and_its_own_environment(lab: Lab) -> None:
    run = await lab.start("who", gpu_mb=1000, env={"GREETING": "hi"}, working_directory="/usr", fence=7)
    assert await run.result() == {
        "id": run.order.task,
        "attempt": 7,
        "devices": ["GPU-sim-0"],
        "cuda": "GPU-sim-0",
        "greeting": "hi",
        "uid": os.getuid(),
        "directory": "/usr",
    }


async def test_run_inherits_only_variables_the_operator_names_and_no_secret(
    open_lab: Callable[..., Awaitable[Lab]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are in this process before head, driver and agent descend from it."""
    monkeypatch.setenv("DATABASE_PASSWORD", "of the service")
    monkeypatch.setenv("PROXY_OF_THE_SITE", "for all")
    lab = await open_lab(inherit_env=("PROXY_OF_THE_SITE",), warm_runners=1)
    names = ["DATABASE_PASSWORD", "PROXY_OF_THE_SITE", "LAUNCH_MODE", "RAY_ADDRESS"]
    own = await lab.start("variables", names)
    shared = await lab.start("variables", names, shareable=True)
    assert [await own.result(), await shared.result()] == [[None, "for all", "local", "local"]] * 2


MAKES_A_RUNNER = """
import json, sys
import ray
from gpubroker.runtime.messages import RunOrder
from gpubroker_server.adapters.ray.agent.runner import Runner
from gpubroker_server.adapters.ray.wire import unpack
address = sys.argv[1]
ray.init(address=address, log_to_driver=False)
runner = ray.remote(Runner).options(num_cpus=0).remote(sys.path, shared=True, env={"RAY_ADDRESS": address})
arguments = json.dumps({"args": [["RAY_ADDRESS"]]}).encode()
order = RunOrder("t", 1, "entrypoint", entrypoint="tests.e2e.ray_jobs:variables", arguments=arguments)
items, acknowledged, ends = [("share", order.to_wire())], 0, []
while not ends:
    told = unpack(ray.get(runner.exchange.remote(5, acknowledged, items)))
    items, acknowledged = [], told[-1][0]
    ends = [report[6] for _, report in told if report[0] == "ended"]
print(ends[0].decode())
"""


async def test_agent_of_the_last_release_cannot_give_runs_the_address_of_its_ray(lab: Lab) -> None:
    """It gives it to each process that it starts, of the software that is installed by then."""
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", MAKES_A_RUNNER, lab.head.address),
        env={**os.environ, **guest_environment(lab.options.data_dir)},
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await program.communicate()
    assert json.loads(said) == ["local"]


@pytest.mark.parametrize(
    ("shares", "calls", "jax"),
    [(((Mib(6_000), 0.25419),), [[0.2541, 0]], "0.2541"), ((), [], None)],
    ids=["a part", "all"],
)
async def test_frameworks_are_held_to_the_lease_before_user_code_uses_them(
    lab: Lab, tmp_path: Path, shares: tuple[tuple[Mib, float], ...], calls: list[Any], jax: str | None
) -> None:
    stand_in_for_torch(tmp_path)
    run = await lab.start("limits_seen", str(tmp_path), gpu_mb=6_100, shares=shares)
    assert await run.result() == {"here": calls, "in a child": calls, "jax": jax}


async def test_a_process_that_had_a_gpu_serves_no_other_run(lab: Lab) -> None:
    leased = await lab.start("who", gpu_mb=1000)
    await leased.first(Gone)
    had_a_gpu = (await leased.first(Started)).pid
    assert not is_there(had_a_gpu)
    others = [await lab.start("who", shareable=shareable) for shareable in (True, False) * 5]
    seen = [await run.result() for run in others]
    assert {one["cuda"] for one in seen} == {""}
    assert had_a_gpu not in {(await run.first(Started)).pid for run in others}


async def test_a_run_without_devices_sees_none(lab: Lab) -> None:
    run = await lab.start("who")
    assert (await run.result())["cuda"] == ""


async def test_two_hundred_small_runs_share_a_process_with_a_result_each(lab: Lab) -> None:
    runs = [await lab.start("add", number, 1, shareable=True) for number in range(200)]
    assert [await run.result() for run in runs] == [number + 1 for number in range(200)]
    assert len({report.pid for run in runs for report in run.reports if hasattr(report, "pid")}) == 1


async def test_the_output_of_small_runs_is_kept_apart(lab: Lab) -> None:
    runs = [await lab.start("say", f"I am {number}", shareable=True) for number in range(5)]
    tails = [(await run.first(Ended)).log_tail for run in runs]
    assert tails == [b"I am %d\n" % number for number in range(5)]


async def test_an_exception_comes_back_with_its_traceback_and_the_output(lab: Lab) -> None:
    ended = await (await lab.start("fail", "no luck")).first(Ended)
    assert ended.ending is Ending.FAILED
    assert ended.failure is not None
    assert (ended.failure.kind, ended.failure.message) == ("exception", "ValueError: no luck")
    assert "raise ValueError(message)" in ended.failure.traceback
    assert "invoke.py" not in ended.failure.traceback
    assert ended.log_tail == b"before the fault\n"


def tells_exit_status() -> bool:
    """Whether this machine's kernel does, of a process that is not ours."""
    child = subprocess.Popen(["true"])
    descriptor = os.pidfd_open(child.pid)
    child.wait()
    try:
        return exit_status_of(descriptor) == 0
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("code", [None, 0])
async def test_a_function_that_exits_with_success_has_succeeded(lab: Lab, code: int | None) -> None:
    assert await (await lab.start("leave", code)).result() is None


@pytest.mark.parametrize(
    ("name", "argument", "words"),
    [
        ("crash", 9, "ended by signal SIGKILL (the kernel does this when memory is short)"),
        ("crash", 11, "ended by signal SIGSEGV"),
        ("end_at_once", 0, "ended with exit code 0 before the function returned, as by os._exit(0)"),
        ("end_at_once", 7, "ended with exit code 7 before the function returned, as by os._exit(7)"),
    ],
)
async def test_a_run_that_crashed_tells_the_signal_or_the_exit_code(
    lab: Lab, name: str, argument: int, words: str
) -> None:
    ended = await (await lab.start(name, argument)).first(Ended)
    assert ended.failure is not None
    assert ended.failure.kind == "killed"
    assert (words if tells_exit_status() else "without a report") in ended.failure.message


async def test_a_run_that_takes_more_host_memory_than_it_asked_for_is_ended(lab: Lab) -> None:
    ended = await (await lab.start("take", 700, memory_mb=512)).first(Ended)
    assert ended.failure is not None
    assert ended.failure.kind == "host_memory_exceeded"
    assert "asked for 512 MiB; ask for more as memory_mb, or take less" in ended.failure.message


async def test_without_memory_mb_each_process_of_a_run_has_its_limit(lab: Lab, tmp_path: Path) -> None:
    """The run whose processes take more than that together goes on, and so does the one that asked for it."""
    one, most, taken = PROCESS_MB + 100, PROCESS_MB - 100, tmp_path / "taken"
    several = await lab.start("take_in_children", [most, most], str(taken))
    asked = await lab.start("take", one, memory_mb=one + 300)
    await eventually(taken.exists)
    over = [
        await lab.start("take", one),
        await lab.start("take", one, shareable=True),
        await lab.start("take_in_children", [one], str(tmp_path / "child")),
    ]
    for run in over:
        failure = (await run.first(Ended)).failure
        assert failure is not None
        assert failure.kind == "host_memory_exceeded"
        assert f"MiB of host memory, and each may take {PROCESS_MB} MiB here" in failure.message
    for run in (several, asked):
        assert run.order_of_kinds() == ["Started"]
        await run.stop(PATIENCE_SECONDS)
        assert (await run.first(Ended)).ending is Ending.STOPPED


@pytest.mark.parametrize(
    ("spec", "kind", "words"),
    [
        ({"name": "leave", **SHARED}, "exception", "SystemExit: 3"),
        ({"entrypoint": "no.such.module:f", **SHARED}, "import_failed", "No module named 'no'"),
        ({"entrypoint": "tests.e2e.ray_jobs:missing", **SHARED}, "import_failed", "missing"),
        ({**FUNCTION, "arguments": b"junk", "python": PYTHON}, "import_failed", "cannot be opened"),
        ({**FUNCTION, "arguments": b"", "python": "3.8"}, "import_failed", "Python 3.8"),
        ({"kind": "command", "command": ("/bin/sh", "-c", "exit 4")}, "exit_code", "exit code 4"),
        ({"kind": "command", "command": ("/bin/sh", "-c", "kill -SEGV $$")}, "exit_code", "SIGSEGV"),
        ({"kind": "command", "command": ("/no/such/program",)}, "exit_code", "cannot start"),
        ({"kind": "command", "command": ("true",), "working_directory": "/no/such"}, "no_directory", "--dir"),
    ],
)
async def test_a_run_that_cannot_succeed_says_why(
    lab: Lab, spec: dict[str, object], kind: str, words: str
) -> None:
    ended = await (await lab.start(**spec)).first(Ended)  # type: ignore[arg-type]  # as parametrized
    assert ended.ending is Ending.FAILED
    assert ended.failure is not None
    assert ended.failure.kind == kind
    assert words in ended.failure.message


@pytest.mark.parametrize(
    ("what", "kind", "remedy"),
    [
        ("lock", "unserializable_result", "result_format=cloudpickle"),
        ("nan", "unserializable_result", "finite numbers"),
        ("set", "unserializable_result", "result_format=cloudpickle"),
    ],
)
async def test_a_result_that_cannot_be_carried_names_the_remedy(
    lab: Lab, what: str, kind: str, remedy: str
) -> None:
    ended = await (await lab.start("give", what, shareable=True)).first(Ended)
    assert ended.failure is not None
    assert ended.failure.kind == kind
    assert remedy in ended.failure.message


async def test_a_large_result_comes_in_parts_and_is_named_when_all_are_stored(lab: Lab) -> None:
    run = await lab.start("give", "large")
    part = await run.first(ObjectPart)
    assert (part.first_byte, part.size_bytes) == (0, 3_000_002)
    lab.executor.answer(PartAnswer(run.order.node, part, part.size_bytes, ""))
    ended = await run.first(Ended)
    assert (ended.result_format, ended.result) == ("object", b'{"object":"%s"}' % part.object.encode())


async def test_a_run_that_keeps_every_core_busy_does_not_hold_up_the_agents_beat(lab: Lab) -> None:
    """It beats each half second here, and three missed beats would be silence."""
    run = await lab.start("burn", 4.0)
    await run.first(Started)
    before = len(lab.beats)
    assert await run.result() == 0
    heard = lab.beats[before:]
    gaps = [later - earlier for earlier, later in pairwise(heard)]
    print(f"beats while every core was busy: {len(heard)}, longest gap {max(gaps):.2f} s")
    assert len(heard) >= 4
    assert max(gaps) < 3 * lab.options.beat_seconds


async def test_checkpoints_and_progress_precede_the_end_and_the_next_run_resumes(lab: Lab) -> None:
    first = await lab.start("save", 3, shareable=True)
    await first.first(Ended)
    saved = [report for report in first.reports if isinstance(report, Checkpointed)]
    assert saved[-1].sequence == 3  # those before it may have been overtaken
    assert first.order_of_kinds()[-2:] == ["Ended", "Gone"]
    newest = [report for report in first.reports if isinstance(report, Progressed)][-1]
    assert newest.fraction == pytest.approx(2 / 3)
    second = await lab.start("resume", fence=2, resume_state=saved[-1].data, result_format="cloudpickle")
    ended = await second.first(Ended)
    assert ended.result is not None
    assert cloudpickle.loads(ended.result) == b"state 2"


async def test_checkpoint_over_the_limit_is_refused_and_the_error_has_a_remedy(lab: Lab) -> None:
    ended = await (await lab.start("save_too_much", shareable=True)).first(Ended)
    assert ended.failure is not None
    assert "checkpoint(uri=...)" in ended.failure.message


async def test_a_checkpoint_may_be_a_uri(lab: Lab) -> None:
    run = await lab.start("hand_over", "s3://bucket/state", shareable=True)
    saved = await run.first(Checkpointed)
    assert (saved.uri, saved.data) == ("s3://bucket/state", None)


async def test_a_run_that_forges_a_report_fails_alone(lab: Lab) -> None:
    forger = await lab.start("forge_a_report", gpu_mb=1000)
    ended = await forger.first(Ended)
    assert ended.failure is not None
    assert "cannot be carried" in ended.failure.message
    await forger.first(Gone)
    assert await (await lab.start("add", 1, 2, shareable=True)).result() == 3
