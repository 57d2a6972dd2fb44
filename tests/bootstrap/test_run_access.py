"""What the service gives a run so that it can submit others, and what that is worth."""

import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpubroker_server.bootstrap.run_access import RunAccess
from gpubroker_server.bootstrap.start_checks import StartRefused
from gpubroker_server.core.domain.submission import RunSpec
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Fence
from gpubroker_server.http.identity import identity_of_run
from gpubroker_server.ports.store import StoreUnavailable
from gpubroker_server.settings.loading import load_settings
from msgspec.structs import replace

from tests.builders import a_task, holding

ENTRYPOINT = RunSpec(kind="entrypoint", entrypoint="team:fit")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def settings(folder: Path, **more: Any) -> Any:
    return load_settings(data_dir=folder / "data", submit_from_tasks=True, **more)


def test_a_run_gets_the_address_and_a_token_that_names_it(tmp_path: Path, listener: socket.socket) -> None:
    run = holding(a_task("t1"), "gpu0").task
    access = RunAccess(settings(tmp_path), listener)
    given = access.env_of(run, ENTRYPOINT)
    assert given["GPUBROKER_URL"] == f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert access.run_of(given["GPUBROKER_TOKEN"]) == ("t1", 1, False)
    elsewhere = RunAccess(settings(tmp_path, tasks_url="https://gpubroker.lab"), listener)
    assert elsewhere.env_of(run, ENTRYPOINT) == {**given, "GPUBROKER_URL": "https://gpubroker.lab"}, (
        "the same key"
    )


def test_no_run_gets_anything_unless_the_operator_says_so(tmp_path: Path, listener: socket.socket) -> None:
    run = holding(a_task("t1"), "gpu0").task
    secret = RunAccess(settings(tmp_path), listener).env_of(run, ENTRYPOINT)["GPUBROKER_TOKEN"]
    without = RunAccess(load_settings(data_dir=tmp_path / "data"), listener)
    assert (without.env_of(run, ENTRYPOINT), without.run_of(secret)) == ({}, None)


@pytest.mark.parametrize(
    "forged",
    [
        "",
        "gpbrun_",
        "gpbrun_t1.1",
        "gpbrun_t1.1.",
        "gpbrun_t1.x.y",
        "gpbrun_t1.1.\u00e9",
        "gpb_t1.1.aaaa",
        "gpbrun_t1.1.code.",
        "gpbrun_t1.1.root.aaaa",
    ],
)
def test_what_was_not_made_with_the_key_names_no_run(
    tmp_path: Path, listener: socket.socket, forged: str
) -> None:
    assert RunAccess(settings(tmp_path), listener).run_of(forged) is None


def test_a_signature_of_another_run_or_key_names_no_run(tmp_path: Path, listener: socket.socket) -> None:
    access = RunAccess(settings(tmp_path), listener)
    token = access.env_of(holding(a_task("t1"), "gpu0").task, ENTRYPOINT)["GPUBROKER_TOKEN"]
    assert access.run_of(token.replace("t1.1.", "t1.2.")) is None
    assert access.run_of(token.replace("t1.1.", "t2.1.")) is None
    assert access.run_of(token.replace("t1.1.", "t1.1.code.")) is None
    assert RunAccess(settings(tmp_path / "other"), listener).run_of(token) is None


def test_the_key_is_private_and_one_that_was_cut_is_refused(tmp_path: Path, listener: socket.socket) -> None:
    given = settings(tmp_path)
    RunAccess(given, listener)
    key = given.objects / "run-tokens.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    key.write_bytes(b"short")
    with pytest.raises(StartRefused, match="holds 5 bytes and should hold 32; remove it"):
        RunAccess(given, listener)


def test_a_broker_without_a_gateway_needs_the_address_of_one(tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match="needs tasks_url in a broker without a gateway"):
        RunAccess(settings(tmp_path), None)


@pytest.mark.parametrize(
    ("state", "fence", "is_valid"),
    [
        (TaskState.RUNNING, 1, True),
        (TaskState.STOPPING, 1, True),
        (TaskState.RUNNING, 2, False),
        (TaskState.PENDING, 1, False),
    ],
)
def test_the_token_is_valid_while_its_run_is_active(state: TaskState, fence: int, is_valid: bool) -> None:
    run = holding(a_task("t1", priority=40), "gpu0", state=state).task
    found = identity_of_run(run, Fence(fence))
    assert (found is not None) is is_valid
    if found is not None:
        assert (found.tenant, found.max_priority) == (run.tenant, 40)
        assert set(found.scopes) == {"tasks:read", "tasks:write"}


@pytest.mark.parametrize(
    ("spec", "brings_code"),
    [
        (ENTRYPOINT, False),
        (RunSpec(kind="entrypoint", entrypoint="team:fit", upload="a" * 64), True),
        (RunSpec(kind="function"), True),
        (RunSpec(kind="command", command=("true",)), True),
    ],
)
def test_only_a_run_whose_code_came_with_it_may_submit_code(
    tmp_path: Path, listener: socket.socket, spec: RunSpec, brings_code: bool
) -> None:
    run = holding(a_task("t1"), "gpu0").task
    access = RunAccess(settings(tmp_path), listener)
    found = access.run_of(access.env_of(run, spec)["GPUBROKER_TOKEN"])
    assert found == ("t1", 1, brings_code)
    identity = identity_of_run(run, found.fence, brings_code=found.brings_code)
    assert identity is not None
    assert {*identity.scopes} - {"tasks:read", "tasks:write"} == (
        {"tasks:code", "tasks:command"} if brings_code else set()
    )


def test_a_run_that_nobody_knows_has_no_identity() -> None:
    assert identity_of_run(None, Fence(1)) is None


def test_ranks_of_a_ray_cluster_get_one_token_from_every_leader(tmp_path: Path) -> None:
    spec = RunSpec("command", command=("train",), ray="private")
    task = holding(a_task("t1"), "gpu0").task
    one, other = (RunAccess(load_settings(data_dir=tmp_path / "data"), None) for _ in range(2))
    given = one.env_of(task, spec)
    assert given == other.env_of(task, spec)
    assert given.keys() == {"RAY_AUTH_TOKEN"}
    assert one.env_of(replace(task, fence=Fence(2)), spec) != given, "each attempt has its own"
    assert one.run_of(given["RAY_AUTH_TOKEN"]) is None
    key = next((tmp_path / "data").rglob("run-tokens.key"))
    key.unlink()
    key.mkdir()
    with pytest.raises(StoreUnavailable, match="the key of tokens cannot be used"):
        one.env_of(task, spec)
