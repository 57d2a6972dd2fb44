"""What the person at the terminal reads when the service starts and stops."""

from pathlib import Path

import pytest
from gpubroker_server.bootstrap.process import farewell, greeting, waiting_in_vain, which_ray
from gpubroker_server.settings.loading import Settings, default_data_dir
from gpubroker_server.settings.ray import RaySettings


def test_the_greeting_names_a_data_directory_that_clients_do_not_know() -> None:
    told = "export GPUBROKER_DATA_DIR=/srv/gpubroker"
    assert told in "\n".join(greeting(Settings(data_dir=Path("/srv/gpubroker")), "http://127.0.0.1:1"))
    assert "export" not in "\n".join(greeting(Settings(data_dir=default_data_dir()), "http://127.0.0.1:1"))


def test_a_start_says_whether_it_joined_a_ray_or_has_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = Settings(ray=RaySettings(address="head:6379"))
    [told] = which_ray(joined)
    assert "on the Ray cluster at head:6379, which was joined" in told
    [told] = which_ray(Settings())
    assert "on a local Ray" in told
    monkeypatch.setenv("RAY_ADDRESS", "other:6379")
    assert "RAY_ADDRESS=other:6379 is not used; name a cluster to join with --ray" in which_ray(joined)[1]
    assert which_ray(Settings(engine="simulated")) == ["  tasks only wait (engine: simulated)"]


def test_the_farewell_names_what_keeps_running_and_how_to_stop_it() -> None:
    said = farewell(Settings(), 2, stop_cluster=False)
    assert "2 runs and the local Ray go on" in said
    assert "gpubroker down" in said
    assert "the local Ray goes on" in farewell(Settings(), 0, stop_cluster=False)
    assert farewell(Settings(), 2, stop_cluster=True) == "gpubroker stopped"


def test_waiting_tasks_of_an_earlier_configuration_are_named_with_a_remedy() -> None:
    settings = Settings(entrypoints=("jobs:*",))
    [said] = waiting_in_vain(settings, {"jobs:f": 7, "demo:f": 2, "demo:g": 40})
    assert "42 waiting tasks" in said
    assert "demo:g (40), demo:f (2)." in said
    assert "allow them again, or cancel them" in said
    assert waiting_in_vain(settings, {"jobs:f": 7}) == []


def test_of_many_withdrawn_entrypoints_a_start_names_the_most_frequent() -> None:
    [said] = waiting_in_vain(Settings(), {f"demo:f{n}": n for n in range(1, 9)})
    assert said.count("demo:") == 5
    assert "demo:f4 (4), and 3 more." in said
