import json
import socket
import ssl
import time
from pathlib import Path

import pytest
from gpubroker import Broker, Unreachable
from gpubroker.transport.connection import find_service

from tests.client.command_line import Run


def written(data_dir: Path, url: str = "http://127.0.0.1:8470", token: str = "from-file") -> dict[str, str]:
    """An environment with the client.json of a service in its data directory."""
    data_dir.mkdir(exist_ok=True)
    (data_dir / "client.json").write_text(json.dumps({"url": url, "token": token}))
    return {"GPUBROKER_DATA_DIR": str(data_dir)}


def test_service_arguments_win_over_environment_and_environment_over_file(tmp_path: Path) -> None:
    environ = written(tmp_path)
    found = find_service(environ=environ)
    assert (found.url, found.token) == ("http://127.0.0.1:8470", "from-file")
    environ |= {"GPUBROKER_URL": "http://env:1/", "GPUBROKER_TOKEN": "from-env"}
    found = find_service(environ=environ)
    assert (found.url, found.token) == ("http://env:1", "from-env")
    found = find_service("http://given:2", "given", environ=environ)
    assert (found.url, found.token) == ("http://given:2", "given")


def test_the_token_of_the_file_is_not_sent_to_another_address(tmp_path: Path) -> None:
    environ = written(tmp_path, url="http://127.0.0.1:8470")
    assert find_service("http://elsewhere:8470", environ=environ).token is None
    assert find_service("http://127.0.0.1:8470/", environ=environ).token == "from-file"


def test_the_file_is_looked_for_where_the_service_writes_it(tmp_path: Path) -> None:
    written(tmp_path / "gpubroker")
    assert find_service(environ={"XDG_STATE_HOME": str(tmp_path)}).token == "from-file"


def test_without_a_known_service_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(Unreachable) as error:
        find_service(environ={"GPUBROKER_DATA_DIR": str(tmp_path)})
    assert "gpubroker serve" in str(error.value)
    assert "GPUBROKER_URL" in str(error.value)
    assert str(tmp_path / "client.json") in str(error.value)


def test_a_damaged_file_and_an_address_without_a_scheme_are_named(tmp_path: Path) -> None:
    for damaged in ("{", "[]"):
        (tmp_path / "client.json").write_text(damaged)
        with pytest.raises(Unreachable, match=r"cannot read .*client\.json"):
            find_service(environ={"GPUBROKER_DATA_DIR": str(tmp_path)})
    with pytest.raises(
        Unreachable, match=r"invalid address 'localhost:8470' \(given\): it must begin with http"
    ):
        find_service("localhost:8470", environ={"GPUBROKER_DATA_DIR": str(tmp_path / "none")})


def test_a_damaged_file_is_not_read_if_url_and_token_are_given(tmp_path: Path) -> None:
    (tmp_path / "client.json").write_text("{")
    environ = {"GPUBROKER_DATA_DIR": str(tmp_path)}
    assert find_service("http://given:2", "given", environ=environ).token == "given"
    environ |= {"GPUBROKER_URL": "http://env:1", "GPUBROKER_TOKEN": "from-env"}
    assert find_service(environ=environ).source == "from GPUBROKER_URL"


def test_the_repr_of_a_connection_hides_the_token(tmp_path: Path) -> None:
    assert "from-file" not in repr(find_service(environ=written(tmp_path)))


def test_certificate_authorities_are_only_loaded_for_https(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    create = ssl.create_default_context

    def noted(*_: object, **__: object) -> ssl.SSLContext:
        read.append(_)
        return create()

    monkeypatch.setattr(ssl, "create_default_context", noted)
    Broker("http://127.0.0.1:8470", "token").close()
    assert read == []
    Broker("https://127.0.0.1:8470", "token").close()
    assert len(read) == 1


def test_in_a_task_the_owners_access_is_unused_and_the_setting_is_named(tmp_path: Path) -> None:
    (tmp_path / "client.json").write_text('{"url": "http://127.0.0.1:8470", "token": "admin"}')
    environ = {"GPUBROKER_DATA_DIR": str(tmp_path), "GPUBROKER_TASK": "task_1"}
    with pytest.raises(Unreachable, match=r"this code runs in task_1, .* submit_from_tasks: true"):
        find_service(environ=environ)
    given = {**environ, "GPUBROKER_URL": "http://h:1", "GPUBROKER_TOKEN": "gpbrun_x"}
    found = find_service(environ=given)
    assert (found.url, found.token) == ("http://h:1", "gpbrun_x")


def test_a_service_that_is_down_is_told_at_once_and_not_tried_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("GPUBROKER_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        began = time.monotonic()
        ended = run("ps")
    assert ended.code == 7
    assert "Connection refused; is the service running?" in ended.err
    assert time.monotonic() - began < 1.5, "retries would take three seconds"
