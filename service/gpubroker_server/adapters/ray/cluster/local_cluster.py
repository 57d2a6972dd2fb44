"""Starts and stops clusters on this machine, adds workers to them, and shows their state.

Each cluster has a folder, `<data_dir>/clusters/<name>`, with the state file and the token of a local head.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpubroker_server.adapters.ray.cluster.layout import ClusterLayout
from gpubroker_server.adapters.ray.cluster.supervisor import CONTROL, LAYOUT
from gpubroker_server.adapters.ray.head.head import (
    LOG,
    HeadState,
    inherited,
    read_state,
    stop_head,
    token_environment,
)

SUPERVISOR = "gpubroker_server.adapters.ray.cluster.supervisor"
ANSWER_SECONDS = 600.0
"""The time limit for the answer of a cluster's supervisor. A worker may take long to start on a busy
machine, and a failed start is repeated."""
END_SECONDS = 30.0
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")

Tell = Callable[[Mapping[str, Any]], None]


class ClusterRefused(Exception):
    """A command on a cluster cannot be carried out. The message says why and what to do."""


def cluster_folder(data_dir: Path, name: str) -> Path:
    """Return the folder of a cluster. Raises ClusterRefused for a bad name: the folder is removed as a
    whole, so the name must not lead elsewhere."""
    if not _NAME.fullmatch(name):
        raise ClusterRefused(f"--name {name!r}: use a to z, digits and -, at most 31 of them")
    return data_dir / "clusters" / name


def run_cluster(data_dir: Path, layout: ClusterLayout, tell: Tell) -> str:
    """Start a cluster, and keep it until SIGINT or SIGTERM; then nothing of it is left. Returns the reason
    if the cluster ended by itself, otherwise an empty text.

    `tell` receives a message about each node that runs, and `{"up": True}` at the end. Raises ClusterRefused.
    """
    folder = cluster_folder(data_dir, layout.name)
    if layout.lacking:
        raise ClusterRefused(layout.lacking)
    with _only_one(folder):
        _check_gpus(data_dir, layout)
        asyncio.run(stop_head(folder))  # a cluster that was killed may have left processes
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / LAYOUT).write_text(layout.to_json())
        try:
            fault = _supervise(folder, tell)
        finally:
            asyncio.run(stop_head(folder))
            shutil.rmtree(folder, ignore_errors=True)
        return fault


def add_worker(data_dir: Path, name: str) -> Mapping[str, Any]:
    """Add a worker node, and return once the node runs. Raises ClusterRefused."""
    answer = _ask(data_dir, name, "add-worker")
    if "refused" in answer:
        raise ClusterRefused(answer["refused"])
    return answer


def status(data_dir: Path, name: str) -> Mapping[str, Any]:
    """Ask the cluster for its state. Raises ClusterRefused."""
    return _ask(data_dir, name, "status") | {"token_file": str(token_file_of(data_dir, name))}


def stop_cluster(data_dir: Path, name: str) -> None:
    """Stop the cluster, and return once none of its processes is left. Raises ClusterRefused."""
    folder = cluster_folder(data_dir, name)
    if read_state(folder) is None:
        raise ClusterRefused(_not_running(data_dir, name))
    asyncio.run(stop_head(folder))
    shutil.rmtree(folder, ignore_errors=True)


def token_file_of(data_dir: Path, name: str) -> Path:
    return cluster_folder(data_dir, name) / "ray-token"


def running_clusters(data_dir: Path) -> Iterator[tuple[str, HeadState]]:
    for folder in sorted((data_dir / "clusters").glob("*/")):
        state = read_state(folder)
        if state is not None and state.is_running():
            yield folder.name, state


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold the cluster's lock. Raises ClusterRefused if another process has it. The kernel releases the lock
    when this process ends."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder.with_suffix(".lock")
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClusterRefused(_running_already(folder)) from None
        if not (path.exists() and path.samefile(f"/proc/self/fd/{lock.fileno()}")):
            raise ClusterRefused(f"cluster {folder.name} ended at this moment; start it again")
        try:
            yield
        finally:
            path.unlink()


def _running_already(folder: Path) -> str:
    state = read_state(folder)
    at_address = f" at {state.address}" if state is not None and state.address else ""
    return (
        f"cluster {folder.name} runs already{at_address}; add to it with `gpubroker cluster add-worker`, end "
        "it with `gpubroker cluster stop`, or give this one another --name"
    )


def _check_gpus(data_dir: Path, layout: ClusterLayout) -> None:
    """Check that no other cluster has one of the GPUs. Raises ClusterRefused."""
    wanted = {gpu.uuid: gpu.index for gpu in layout.gpus if not gpu.simulated_mb}
    for name, _ in running_clusters(data_dir):
        text = (cluster_folder(data_dir, name) / LAYOUT).read_text()
        shared = sorted(wanted[gpu.uuid] for gpu in ClusterLayout.from_json(text).gpus if gpu.uuid in wanted)
        if shared and name != layout.name:
            raise ClusterRefused(
                f"cluster {name} has GPU {', '.join(map(str, shared))} already; stop it, or give each "
                "cluster GPUs of its own: CUDA_VISIBLE_DEVICES=2,3 gpubroker cluster start"
            )


def _supervise(folder: Path, tell: Tell) -> str:
    """Return why the cluster ended by itself; empty if it was told to end."""
    read_end, write_end = os.pipe()
    living, life = os.pipe()
    environment = inherited() | token_environment(folder) | {"PYTHONUNBUFFERED": "1"}
    with (folder / LOG).open("wb") as output, os.fdopen(life, "wb", 0), os.fdopen(read_end, "r") as messages:
        supervisor = subprocess.Popen(  # noqa: S603  # our own module
            [sys.executable, "-m", SUPERVISOR, str(folder), str(write_end), str(living)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=(write_end, living),
            start_new_session=True,
        )
        os.close(write_end)
        os.close(living)
        fault = ""
        with _interruptible(supervisor):
            for line in messages:
                message = json.loads(line)
                fault = message.get("fault", "")
                if not fault:
                    tell(message)
        with contextlib.suppress(subprocess.TimeoutExpired):
            supervisor.wait(END_SECONDS)
        if supervisor.returncode == 0:
            return ""
        tail = (folder / LOG).read_text(errors="replace")[-2000:]
        return f"{fault or 'the process that watches the cluster was killed'}\n{tail}".rstrip()


@contextmanager
def _interruptible(supervisor: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Pass on SIGINT and SIGTERM to the supervisor as SIGTERM. Its output then ends when it has ended."""

    def pass_on(_number: int, _frame: Any) -> None:
        supervisor.terminate()

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ask(data_dir: Path, name: str, question: str) -> dict[str, Any]:
    state = read_state(cluster_folder(data_dir, name))
    if state is None or not state.is_running():
        raise ClusterRefused(_not_running(data_dir, name))
    if not state.address:
        raise ClusterRefused(f"cluster {name} is starting; try again when it is up")
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(ANSWER_SECONDS)
        try:
            client.connect(str(Path(state.temp_dir) / CONTROL))
            client.sendall(question.encode())
            answer: dict[str, Any] = json.loads(b"".join(iter(lambda: client.recv(65536), b"")))
        except (OSError, ValueError) as fault:
            raise ClusterRefused(f"cluster {name} did not answer ({fault}); try again, or stop it") from None
    return answer


def _not_running(data_dir: Path, name: str) -> str:
    others = [other for other, _ in running_clusters(data_dir)]
    hint = f"; running are {', '.join(others)} (--name)" if others else ""
    return f"no cluster {name} of {data_dir} runs{hint}; start one with `gpubroker cluster start`"
