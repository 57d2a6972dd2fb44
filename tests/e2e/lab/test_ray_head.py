"""The local head as a neighbour: what it listens on, what it leaves behind, who may join it."""

import asyncio
import os
import pwd
import signal
import socket
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from gpubroker_server.adapters.ray.driver.executor import RayExecutor
from gpubroker_server.adapters.ray.head.head import HeadState, read_state, write_state
from gpubroker_server.bootstrap.diagnosis.health import health_of
from gpubroker_server.core.domain.leader_term import LeaderTerm
from gpubroker_server.core.domain.orders import Ended, Gone, NodeLost, NodeReport, Progressed, Started
from gpubroker_server.core.domain.units import Lineage, Term
from msgspec.structs import replace

from tests.e2e.ray_lab import Lab, SystemClock, agents_of, eventually, is_there, lab_options
from tests.places import short_place

OpenLab = Callable[..., Awaitable[Lab]]

pytestmark = pytest.mark.asyncio(loop_scope="session")


def session_of(head: HeadState) -> list[int]:
    """Everything that the head started and that is still there."""
    found = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == head.pid and is_there(pid):
                found.append(pid)
        except ProcessLookupError:
            continue
    return found


MAX_LISTENERS = {
    "gcs_server": 1,
    "raylet": 2,
    "ray::DashboardAge": 2,
    "ray::RuntimeEnvA": 1,
    "ray::": 1,
    "python": 1,
}
"""Ports of one process, by how its name begins; `ray::` are the node agent and the runners."""
RAY_CLIENT, DASHBOARD = 10001, 8265


async def test_every_listening_port_is_known_and_closed_to_other_machines(lab: Lab) -> None:
    """Of all processes of the head, and of the driver. Without a port for Ray Client or for the dashboard."""
    await (await lab.start("add", 1, 2, shareable=True)).result()
    ours = set(session_of(lab.head)) | {child.pid for child in psutil.Process().children()}
    listening = [
        (psutil.Process(connection.pid).name(), connection.laddr.ip.removeprefix("::ffff:"), connection)
        for connection in list[Any](psutil.net_connections("inet"))
        if connection.status == psutil.CONN_LISTEN and connection.pid in ours
    ]
    assert {address for _, address, _ in listening} == {"127.0.0.1"}
    assert {connection.laddr.port for *_, connection in listening}.isdisjoint({RAY_CLIENT, DASHBOARD})
    names = {name for name, *_ in listening}
    assert {"gcs_server", "raylet"} <= names
    ports = Counter((name, connection.pid) for name, _, connection in listening)
    assert {key: n for key, n in ports.items() if n > _most_listeners(key[0])} == {}


def _most_listeners(process: str) -> int:
    return next((n for start, n in MAX_LISTENERS.items() if process.startswith(start)), 0)


async def test_no_process_of_the_dashboard_runs(lab: Lab) -> None:
    words = [word for pid in session_of(lab.head) for word in psutil.Process(pid).cmdline()]
    assert any(word.endswith("raylet") for word in words)
    assert not any(word.endswith("dashboard.py") for word in words)


async def test_the_secrets_of_the_head_are_for_its_user_only(lab: Lab) -> None:
    home = lab.options.data_dir
    assert stat.S_IMODE((home / "ray-token").stat().st_mode) == 0o600
    assert stat.S_IMODE((home / "runs" / "local").stat().st_mode) == 0o700
    assert stat.S_IMODE(os.stat(lab.head.temp_dir).st_mode) == 0o700


async def test_a_killed_head_is_replaced_and_its_runs_are_reported_gone(open_lab: OpenLab) -> None:
    """And the one after it, which is stopped, leaves no process and no directory."""
    lab = await open_lab()
    run = await lab.start("ignore_the_notice", gpu_mb=1000)
    head = lab.head
    pid = (await run.first(Started)).pid
    before = len(lab.nodes)
    os.kill(head.pid, signal.SIGKILL)
    lost = await lab.until(lambda: [node for node in lab.nodes[before:] if isinstance(node, NodeLost)])
    assert lost[0].why == "the local Ray head ended"
    seen = await lab.until(lambda: [node for node in lab.nodes[before:] if isinstance(node, NodeReport)])
    assert (run.order.task, 1, 0) in seen[-1].runs
    assert (await run.first(Gone)).proof == "agent_restarted"
    assert not is_there(pid)
    assert not any(isinstance(report, Ended) for report in run.reports)
    assert_nothing_is_left(head)

    replaced = lab.head
    assert replaced != head
    run = await lab.start("ignore_the_notice")
    await run.first(Started)
    assert len(session_of(replaced)) > 4
    await lab.close(stop_cluster=True)
    assert_cleared_away(replaced, lab)


async def test_a_head_stays_while_it_is_used_and_stops_by_itself_later(open_lab: OpenLab) -> None:
    lab = await open_lab()
    head = lab.head
    sign_of_life = head.keepalive.stat().st_mtime
    await eventually(lambda: head.keepalive.stat().st_mtime > sign_of_life)
    await lab.close(stop_cluster=False)
    [agent] = agents_of(head)
    os.kill(agent, signal.SIGSTOP)
    head.keepalive.unlink()
    await eventually(head.keepalive.exists)
    assert is_there(head.pid)
    long_ago = time.time() - lab.options.idle_stop_seconds - 1
    os.utime(head.keepalive, (long_ago, long_ago))
    await eventually(lambda: not is_there(head.pid))
    assert_cleared_away(head, lab)


async def test_a_head_of_another_release_is_neither_adopted_nor_killed(lab: Lab, tmp_path: Path) -> None:
    write_state(tmp_path, replace(lab.head, ray="1.0.0"))
    executor = RayExecutor(lab_options(tmp_path), SystemClock())
    starting = asyncio.create_task(executor.start(LeaderTerm(Term(1)), Lineage(0)))
    await eventually(lambda: executor.status()["state"] == "failed")
    assert "a Ray 1.0.0 head" in executor.status()["message"]
    starting.cancel()
    await executor.close(stop_cluster=False)
    assert is_there(lab.head.pid)


async def test_a_joined_cluster_is_used_and_never_stopped(lab: Lab, as_guest: str, open_lab: OpenLab) -> None:
    guest = await open_lab(address=as_guest)
    assert (await guest.node()).node.name != (await lab.node()).node.name
    run = await guest.start("ignore_the_notice")
    pid = (await run.first(Started)).pid
    node = (await guest.node()).node.name
    run_dir = Path(guest.options.agent_config("").run_dir)
    await eventually((run_dir / node).is_dir)
    await guest.close(stop_cluster=True)
    assert not is_there(pid)
    await eventually(lambda: len(agents_of(lab.head)) == 1)
    await eventually(lambda: not (run_dir / node).exists())  # others' nodes may have been killed
    assert await (await lab.start("add", 1, 2, shareable=True)).result() == 3


async def test_the_health_of_a_node_is_whether_its_raylet_answers(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir=short_place()) as place:
        monkeypatch.setenv("RAY_TMPDIR", place)
        (Path(place) / "ray").symlink_to(lab.head.ray_dir)
        assert health_of(tmp_path, "node").is_alive
        (Path(place) / "ray").unlink()
        stale = Path(place) / "ray/session_latest/sockets"
        stale.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as ended:
            ended.bind(str(stale / "raylet"))
        assert health_of(tmp_path, "node").sentence.endswith("Connection refused")


async def test_a_run_becomes_the_task_user_where_the_service_is_root(
    as_guest: str, open_lab: OpenLab
) -> None:
    guest = await open_lab(address=as_guest, task_user="nobody", warm_runners=int(os.geteuid() == 0))
    own = await guest.start(kind="command", command=("id", "-un"), arguments=b"")
    says = 'echo progress 0.5 > "$GPUBROKER_REPORTS"'
    reporting = await guest.start(kind="command", command=("/bin/sh", "-c", says), arguments=b"")
    shared = await guest.start(entrypoint="posix:getuid", shareable=True)
    ended = await own.first(Ended)
    if os.geteuid() == 0:
        assert (await reporting.first(Progressed)).fraction == 0.5
        assert ended.log_tail == b"nobody\n"
        assert await shared.result() == pwd.getpwnam("nobody").pw_uid
    else:
        assert ended.failure is not None
        assert "could not be prepared" in ended.failure.message


def assert_nothing_is_left(head: HeadState) -> None:
    assert session_of(head) == []
    assert not Path(head.temp_dir).exists()


def assert_cleared_away(head: HeadState, lab: Lab) -> None:
    assert_nothing_is_left(head)
    assert read_state(lab.options.data_dir) is None
