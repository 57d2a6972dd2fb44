import subprocess
import sys

import pytest
from gpubroker.cli.app import _PLACES, command_of

HEAVY = {"ray", "sqlalchemy", "fastapi", "starlette", "pydantic", "gpubroker_server", "sklearn", "numpy"}


def loaded_by(statement: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter has loaded after the statement."""
    program = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    return set(output.split())


@pytest.mark.parametrize(
    "statement", ["from gpubroker import Broker, AsyncBroker", "import gpubroker.cli.app"]
)
def test_the_client_imports_neither_the_server_nor_its_libraries(statement: str) -> None:
    assert not loaded_by(statement) & HEAVY


def test_a_task_imports_no_http_client() -> None:
    assert not loaded_by("from gpubroker import current_task, Stopped") & {"httpx", "rich", "typer"}


def test_the_command_line_imports_httpx_and_cloudpickle_only_when_needed() -> None:
    assert not loaded_by("import gpubroker.cli.app") & {"httpx", "cloudpickle"}


def test_a_command_imports_no_other_command_and_no_asyncio() -> None:
    """Each of them costs a person at a terminal some milliseconds; see `bench cli`."""
    ask = "import gpubroker.cli.app as app; app.command_of('show'); import gpubroker.broker"
    program = f"{ask}\nimport sys; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    loaded = set(output.stdout.split())
    modules = {f"gpubroker.cli.{module}" for _, module in _PLACES.values()} - {"gpubroker.cli.tasks.view"}
    assert loaded & modules == {"gpubroker.cli.tasks.events"}, "which `show` needs"
    assert not loaded & {"asyncio", "importlib.metadata"}


@pytest.mark.parametrize("name", _PLACES)
def test_every_command_of_the_table_is_in_its_module(name: str) -> None:
    assert command_of(name).name == name


def test_every_public_name_is_there() -> None:
    import gpubroker

    assert set(gpubroker.__all__) <= set(dir(gpubroker))
    assert all(getattr(gpubroker, name) for name in gpubroker.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Brocker'"):
        gpubroker.Brocker  # noqa: B018 - the access is the test
