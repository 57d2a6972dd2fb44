"""`gpubroker config`, `--set`, and the pages that are made from config.example.yaml."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml
from gpubroker_server.__main__ import commands
from gpubroker_server.settings.loading import SettingsRefused, load_settings
from gpubroker_server.settings.reference import (
    DocumentedSetting,
    documented_settings,
    settings_page,
    settings_schema,
)
from typer.testing import CliRunner, Result

from tests.architecture.source_tree import ROOT


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`gpubroker config`, without settings of this machine."""
    monkeypatch.delenv("GPUBROKER_DATA_DIR", raising=False)
    app = typer.Typer()
    commands(app)
    return lambda *words: CliRunner().invoke(app, ["config", *map(str, words)])


def test_set_overrides_every_other_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("limits: {body_bytes: 1}\nray: {spares: 7}\n", encoding="utf-8")
    monkeypatch.setenv("GPUBROKER_LIMITS__BODY_BYTES", "2")
    sets = ["limits.body_bytes=16MiB", "entrypoints=[a.b:*]", "port=3", "triton.batch={m: {max_size: 4}}"]
    settings = load_settings(file, sets=sets, port=4)
    assert (settings.limits.body_bytes, settings.port, settings.ray.spares) == (16 * 2**20, 3, 7)
    assert (settings.entrypoints, settings.triton.batch["m"].most_rows) == (("a.b:*",), 4)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("limits.body_bytes", "write NAME=VALUE, such as limits.body_bytes=16MiB"),
        (".port=1", "write NAME=VALUE"),
        ("port=[", "is not YAML; put it in quotes"),
        ("limits.bdy_bytes=1", r'did you mean "body_bytes"\? \(in --set limits.bdy_bytes\)'),
        ("port=high", r"port: .*found 'high' \(in --set port\)"),
    ],
)
def test_wrong_set_is_refused_with_its_remedy(text: str, fault: str) -> None:
    with pytest.raises(SettingsRefused, match=fault):
        load_settings(sets=[text])


def test_check_reports_all_faults_together(config: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("prot: 1\nray: {spares: many}\n", encoding="utf-8")
    refused = config("check", "--config", file, "--set", "limits.body_bytes=0")
    assert refused.exit_code == 2
    for part in ('did you mean "port"', f"in {file}", "ray.spares", "in --set limits.body_bytes"):
        assert part in refused.stderr


def test_check_says_how_many_settings_it_read(config: Callable[..., Result], tmp_path: Path) -> None:
    assert "all settings have their defaults" in config("check").stdout
    file = tmp_path / "right.yaml"
    file.write_text("port: 1\nray: {spares: 1}\n", encoding="utf-8")
    right = config("check", "--config", file, "--set", "access_log=true")
    assert (right.exit_code, right.stdout) == (
        0,
        f"the configuration is right: 3 settings from --set access_log, {file}\n",
    )


def test_show_names_the_source_that_holds(
    config: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("port: 1\nfleet: {disk: {warn_percent: 50}, idle_check_seconds: 5}\n", encoding="utf-8")
    file.with_name("config.yaml.local").write_text("fleet: {disk: {warn_percent: 51}}\n", encoding="utf-8")
    monkeypatch.setenv("GPUBROKER_PORT", "2")
    monkeypatch.setenv("GPUBROKER_TARGET_UTIL_MIN", "55")
    shown = config("show", "--origin", "--config", file, "--set", "ray.gpus=[0, 1]", "-o", "json")
    found = {row["setting"]: (row["value"], row["origin"]) for row in json.loads(shown.stdout)}
    assert found == {
        "port": ("2", "GPUBROKER_PORT"),
        "fleet.disk.warn_percent": (51, f"{file}.local"),
        "fleet.idle_check_seconds": (5, str(file)),
        "fleet.target_util_min_percent": ("55", "GPUBROKER_TARGET_UTIL_MIN"),
        "ray.gpus": ([0, 1], "--set ray.gpus"),
    }


def test_show_hides_passwords_tokens_and_headers(config: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    server = {"name": "a", "http_url": "http://h:8000", "headers": {"X-Key": "hidden2"}}
    tree = {
        "database_url": "postgresql://me:hidden3@h/db",
        "triton": {"servers": [server]},
        "task_env": {"HF_TOKEN": "hidden4", "WANDB_API_KEY": "hidden5", "LOG_LEVEL": "DEBUG"},
        "environments": {"index_url": "https://hidden6@pypi.lab/simple"},
        "extensions": {"chat": {"url": "https://chat.lab/hooks/hidden7"}},
    }
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    for form in ("table", "json", "ndjson"):
        shown = config("show", "--config", file, "-o", form).stdout
        assert "hidden" not in shown
        for part in ("postgresql://me:***@h/db", "https://***@pypi.lab/simple", "DEBUG"):
            assert part in shown


def test_show_with_defaults_lists_every_setting(config: Callable[..., Result]) -> None:
    shown = json.loads(config("show", "--defaults", "--set", "port=1", "-o", "json").stdout)
    documented = [setting.name for setting in documented_settings() if not setting.is_section]
    assert [row["setting"] for row in shown] == documented
    assert {row["setting"] for row in shown if row["origin"] != "default"} == {"port"}


def test_reference_page_is_that_of_the_settings() -> None:
    """If this fails: gpubroker config reference > docs/reference/settings.md"""
    assert (ROOT / "docs/reference/settings.md").read_text(encoding="utf-8") == settings_page()


def test_schema_accepts_the_example_and_describes_it(config: Callable[..., Result]) -> None:
    schema = json.loads(config("schema").stdout)
    assert schema == settings_schema()
    example = yaml.safe_load((ROOT / "config.example.yaml").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    assert [error.message for error in validator.iter_errors(example)] == []
    assert [*validator.iter_errors({"prot": 1})] != []
    assert schema["properties"]["port"]["description"] == "0 takes a free port"


@pytest.mark.parametrize(
    "setting", [one for one in documented_settings() if not one.is_section], ids=lambda one: one.name
)
def test_comment_names_every_field_of_an_entry(setting: DocumentedSetting) -> None:
    schema = settings_schema()
    place: Any = schema
    for name in setting.path:
        place = _properties(schema, place)[name]
    said = f"{setting.text} {json.dumps(setting.default)}"
    fields = {
        field for model in _models(schema, place) for field in schema["$defs"][model].get("properties", ())
    }
    assert [field for field in sorted(fields) if not re.search(rf"\b{field}\b", said)] == []


def _properties(schema: Any, place: Any) -> Any:
    for part in (place, *place.get("anyOf", ())):
        if "$ref" in part:
            return schema["$defs"][part["$ref"].rpartition("/")[2]]["properties"]
    return place["properties"]


def _models(schema: Any, place: Any, known: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield the models of the entries that a part of the schema refers to, and of their entries."""
    for value in place.values() if isinstance(place, dict) else place if isinstance(place, list) else ():
        yield from _models(schema, value, known)
    name = place.get("$ref", "").rpartition("/")[2] if isinstance(place, dict) else ""
    if name and name not in known:
        yield name
        yield from _models(schema, schema["$defs"][name], known | {name})
