"""A user without a name or a home, as in containers that run under any user id."""

import os
import pwd
from pathlib import Path
from typing import NoReturn

import httpx
import pytest
from gpubroker import AsyncBroker, Unreachable
from gpubroker.cli import lookup
from gpubroker.transport.connection import client_file, find_service
from gpubroker.user_places import expanded, home_directory, state_directory, user_name

from tests.client.command_line import Run
from tests.client.recorded_service import RecordedService, Reply
from tests.gateway.harness import Gateway


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system knows neither name nor home of this process's user, and nor does its environment."""

    def unknown(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for variable in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "XDG_STATE_HOME", "GPUBROKER_DATA_DIR"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.usefixtures("nobody")
def test_a_user_without_name_and_home_has_a_number_and_no_directories() -> None:
    assert user_name() == f"uid {os.geteuid()}"
    assert (home_directory(), state_directory(), client_file()) == (None, None, None)
    with pytest.raises(ValueError, match="home directory that this system does not know"):
        expanded(Path("~/data"))


def test_the_environment_is_asked_before_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pwd, "getpwuid", lambda _uid: pytest.fail("the answer is not needed"))
    assert user_name({"USER": "olga"}) == "olga"
    assert state_directory({"HOME": "/olga"}) == Path("/olga/.local/state")
    assert state_directory({"XDG_STATE_HOME": "/state", "HOME": "/olga"}) == Path("/state")


@pytest.mark.usefixtures("nobody")
def test_a_client_that_was_told_its_service_needs_no_home() -> None:
    assert find_service("http://h", "t").url == "http://h"
    assert find_service(environ={"GPUBROKER_URL": "http://h", "GPUBROKER_TOKEN": "t"}).token == "t"
    assert find_service("http://h").token is None
    with pytest.raises(Unreachable, match="this user has no home directory with a client"):
        find_service()
    with pytest.raises(Unreachable, match="GPUBROKER_DATA_DIR: ~/data begins in a home directory"):
        find_service(environ={"GPUBROKER_DATA_DIR": "~/data"})


@pytest.mark.usefixtures("nobody")
def test_commands_work_without_a_home_and_remember_no_last_task(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(200, {"items": []}))
    assert run("nodes").code == 0
    assert lookup._submitted() == {}


@pytest.mark.usefixtures("nobody")
async def test_a_lease_of_a_nameless_user_names_the_number_if_no_holder_is_given() -> None:
    async with Gateway() as gateway:
        token = (await gateway.client("sdk")).headers["authorization"].removeprefix("Bearer ")
        transport = httpx.ASGITransport(gateway.app)
        async with AsyncBroker("http://127.0.0.1:8470", token, transport=transport) as broker:
            asked = await broker.ask_lease(gpu_mb=1024)
            assert f"of uid {os.geteuid()} on " in asked.holder
            assert (await broker.ask_lease(gpu_mb=1024, holder="mine")).holder == "mine"


async def test_a_lease_with_a_holder_asks_the_system_for_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LOGNAME", "USER"):
        monkeypatch.delenv(variable, raising=False)
    async with Gateway() as gateway:
        token = (await gateway.client("sdk")).headers["authorization"].removeprefix("Bearer ")
        transport = httpx.ASGITransport(gateway.app)
        async with AsyncBroker("http://127.0.0.1:8470", token, transport=transport) as broker:
            monkeypatch.setattr(pwd, "getpwuid", lambda _uid: pytest.fail("the answer is not needed"))
            assert (await broker.ask_lease(gpu_mb=1024, holder="mine")).holder == "mine"
