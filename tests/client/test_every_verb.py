"""Every verb of the command line with its defaults: only what it requires is given."""

import io
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import typer
from gpubroker import Broker, WorkerSet
from gpubroker.cli import main
from gpubroker.cli.app import app
from typer.core import TyperGroup
from typer.main import get_command

from tests.chaos.forked import ForkedService
from tests.client.command_line import Run, command_line
from tests.e2e.service_process import ServiceProcess, until

WORK = "tests.e2e.work:hold"
"""An entrypoint that the service allows; here it waits for `seconds` and returns nothing."""

VERBS: Final[Mapping[str, tuple[str, int]]] = {
    "submit": (f"{WORK} -i seconds=0", 0),
    "ps": ("", 0),
    "show": ("{task}", 0),
    "explain": ("{task}", 0),
    "wait": ("{task}", 0),
    "result": ("{task}", 0),
    "logs": ("{task}", 0),
    "map": (f"{WORK} --detach", 0),
    "array": ("{array}", 0),
    "workers create": ("tests.e2e.work:Counter", 0),
    "workers list": ("", 0),
    "workers show": ("{workers}", 0),
    "workers scale": ("{workers} 1", 0),
    "workers signal": ("{workers} 1", 6),
    "workers call": ("{ended} value", 6),
    "workers end": ("{workers}", 0),
    "events": ("", 0),
    "cancel": ("{other}", 0),
    "retry": ("{task}", 0),
    "stack": ("{task}", 6),
    "outputs": ("{task}", 0),
    "hold": ("{waiting}", 0),
    "priority": ("{waiting} 10", 0),
    "change": ("{waiting}", 2),
    "release": ("{waiting}", 0),
    "lease ask": ("--gpu-memory 1GiB", 0),
    "lease run": ("--gpu-memory 1GiB -- true", 0),
    "lease list": ("", 0),
    "lease show": ("{lease}", 0),
    "lease renew": ("{lease}", 0),
    "lease release": ("{lease}", 0),
    "estimates": ("", 0),
    "progress": ("0.5", 2),
    "checkpoint": ("", 2),
    "complete": ("", 2),
    "gpus": ("", 0),
    "tenants": ("", 0),
    "stats": ("", 0),
    "policy": ("", 0),
    "profiles": ("", 0),
    "demand": ("", 0),
    "targets": ("", 0),
    "doctor": ("", 0),
    "nodes": ("", 0),
    "close-gpu": ("gpu0", 6),
    "reopen-gpu": ("gpu0", 6),
    "cordon": ("{node}", 0),
    "drain": ("{node}", 0),
    "uncordon": ("{node}", 0),
    "disk": ("{node}", 0),
    "clean": ("{node}", 0),
    "streams": ("", 0),
    "streams put": ("mine 2", 0),
    "streams signal": ("mine --quality 0.5", 0),
    "streams next": ("", 0),
    "streams delete": ("mine", 0),
    "pause": ("", 2),
    "resume": ("", 2),
    "quarantine": ("", 0),
    "quarantine release": ("{task} --because gone", 6),
    "plan": ("-f {plan}", 0),
    "infer": ("m -i x=1", 6),
    "load": ("m", 6),
    "unload": ("m", 6),
    "pin": ("m", 6),
    "models": ("", 0),
    "models measure": ("m", 6),
    "upload": ("{file}", 0),
    "objects": ("", 0),
    "objects download": ("{object} {new}", 0),
    "objects delete": ("{object}", 0),
    "token create": ("mine --scope tasks:read", 0),
    "token list": ("", 0),
    "token revoke": ("mine", 0),
    "secrets set": ("KEY", 0),
    "secrets list": ("", 0),
    "secrets delete": ("KEY", 0),
    "idle-template create": ("mine {template} --max-running 1", 0),
    "idle-template list": ("", 0),
    "idle-template delete": ("mine", 0),
    "version": ("", 0),
}
"""The words that each verb of the client requires, and its exit code at a service without models. A verb
finds what those before it left."""


def verbs(command: Any, words: tuple[str, ...], context: typer.Context) -> Iterator[tuple[str, Any]]:
    """Yield all verbs below a command, with what carries them out."""
    if not isinstance(command, TyperGroup):
        yield " ".join(words), command
        return
    if command.invoke_without_command and words:
        yield " ".join(words), command
    for name in command.list_commands(context):
        below: Any = command.get_command(context, name)
        yield from verbs(below, (*words, name), typer.Context(below, parent=context, info_name=name))


def every_verb() -> Mapping[str, Any]:
    top = get_command(app)
    return dict(verbs(top, (), typer.Context(top)))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ForkedService(tmp_path_factory.mktemp("service") / "data", engine="simulated") as running:
        yield running


@pytest.fixture
def gpubroker(
    service: ServiceProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    monkeypatch.setenv("GPUBROKER_DATA_DIR", str(service.data_dir))
    return command_line(monkeypatch, capsys)


def test_the_table_has_every_verb_of_the_client() -> None:
    of_the_service = {
        verb
        for verb, command in every_verb().items()
        if command.callback.__module__.startswith("gpubroker_server") and verb != "doctor"
    }
    assert every_verb().keys() - of_the_service == VERBS.keys()


@pytest.mark.parametrize("verb", every_verb())
def test_the_default_of_each_option_is_one_that_it_reads(verb: str) -> None:
    """Also of the verbs that start and stop a service."""
    command = every_verb()[verb]
    for option in command.params:
        if not option.required:
            context = typer.Context(command)
            option.type_cast_value(context, option.get_default(context))


@pytest.mark.parametrize("verb", ["", *every_verb()])
def test_help_is_written_to_a_terminal_without_utf_8(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(screen, encoding="ascii"))
    monkeypatch.setattr("sys.argv", ["gpubroker", *verb.split(), "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    sys.stdout.flush()
    assert (ended.value.code, b"Usage" in screen.getvalue()) == (0, True)


def test_every_verb_runs_with_its_defaults(
    service: ServiceProcess, gpubroker: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "plan").write_text("components:\n  - {name: a, count: 1, resources: {gpu_mb: 1024}}\n")
    (tmp_path / "template").write_text(json.dumps({"run": {"entrypoint": WORK}, "resources": {"gpus": 1}}))
    (tmp_path / "file").write_bytes(b"pixels")
    known = {name: str(tmp_path / name) for name in ("plan", "template", "file", "new")}
    with service.broker as broker:
        known |= made_at(broker)
        ended: dict[str, str] = {}
        for verb, (words, _) in VERBS.items():
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"1\n")))
            ran = gpubroker(f"{verb} {words.format(**known)}")
            ended[verb] = f"{ran.code} {ran.err if ran.code else ''}"
            if verb == "lease ask":
                known["lease"] = ran.out.strip()
    wrong = {verb: end for verb, end in ended.items() if int(end.split()[0]) != VERBS[verb][1]}
    assert wrong == {}


def made_at(broker: Broker) -> dict[str, str]:
    """Make what the verbs are about, and return its ids."""
    done = broker.submit(WORK, kwargs={"seconds": 0})
    broker.wait(done)
    waiting, other = (broker.submit(WORK, kwargs={"seconds": 0}, held=True) for _ in range(2))
    ended: WorkerSet = broker.create_worker_set("tests.e2e.work:Counter")
    broker.end_worker_set(ended)
    until(lambda: broker.worker_set(ended).state == "over", "the set is over")
    return {
        "task": done.id,
        "other": other.id,
        "waiting": waiting.id,
        "array": broker.submit_array(WORK, [1], held=True).id,
        "workers": broker.create_worker_set("tests.e2e.work:Counter").id,
        "ended": ended.id,
        "node": broker.nodes().items[0].name,
        "object": broker.put(b"bytes").id,
    }
