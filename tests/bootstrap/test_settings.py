"""Settings: four sources in order, and wrong ones refused with the fix named."""

from pathlib import Path

import pytest
import typer
import yaml
from gpubroker_server.__main__ import commands
from gpubroker_server.bootstrap.compose import fleet_rules_of
from gpubroker_server.core.control.alarm import Threshold
from gpubroker_server.core.control.disk_guard import DiskRules
from gpubroker_server.core.control.throughput import ThroughputRules
from gpubroker_server.core.domain.device import FileClass, WatchedRoot
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.settings.loading import (
    Settings,
    SettingsRefused,
    load_settings,
    settings_model,
)
from msgspec.structs import replace
from pydantic import BaseModel
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]


def a_file(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def names_of(model: type[BaseModel], prefix: str = "") -> set[str]:
    names = set()
    for name, field in model.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            names |= names_of(nested, f"{prefix}{name}.")
        else:
            names.add(prefix + name)
    return names


def flattened(tree: dict[str, object], settings: set[str], prefix: str = "") -> set[str]:
    names = set()
    for name, value in tree.items():
        if prefix + name not in settings and isinstance(value, dict):
            names |= flattened(value, settings, f"{prefix}{name}.")
        else:
            names.add(prefix + name)
    return names


def test_the_example_file_holds_every_setting_and_no_other() -> None:
    example = yaml.safe_load((ROOT / "config.example.yaml").read_text(encoding="utf-8"))
    known = names_of(settings_model())
    assert flattened(example, known) == known


def test_the_example_file_loads_and_shows_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUBROKER_DATA_DIR", raising=False)
    assert replace(load_settings(ROOT / "config.example.yaml"), data_dir=Path("/")) == Settings(
        data_dir=Path("/")
    )


def test_each_source_overrides_the_one_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = a_file(tmp_path, "port: 1\nlog_level: DEBUG\nray: {spares: 1, warm_runners: 1, max_runs: 1}\n")
    a_file(tmp_path, "ray: {spares: 2, warm_runners: 2}\n", name="config.yaml.local")
    monkeypatch.setenv("GPUBROKER_RAY__WARM_RUNNERS", "3")
    settings = load_settings(config, port=4)
    assert (settings.ray.max_runs, settings.ray.spares, settings.ray.warm_runners) == (1, 2, 3)
    assert (settings.port, settings.log_level) == (4, "DEBUG")


def test_the_environment_gives_lists_as_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUBROKER_ENTRYPOINTS", "a.b:*, c:d")
    monkeypatch.setenv("GPUBROKER_TASK_PATH", "/srv/a,/srv/b")
    monkeypatch.setenv("GPUBROKER_RAY__INHERIT_ENV", "HOME, LANG")
    settings = load_settings()
    assert settings.entrypoints == ("a.b:*", "c:d")
    assert settings.task_path == (Path("/srv/a"), Path("/srv/b"))
    assert settings.ray.inherit_env == ("HOME", "LANG")


def test_the_data_directory_may_name_the_home_directory(tmp_path: Path) -> None:
    assert load_settings(a_file(tmp_path, "data_dir: ~/here\n")).data_dir == Path.home() / "here"
    ray = load_settings(a_file(tmp_path, "ray: {address: 'h:1', token_file: ~/t}\n")).ray
    assert ray.token_file == Path.home() / "t"


def test_a_cluster_is_joined_by_file_environment_or_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = a_file(tmp_path, "ray: {address: 'file:6379', spares: 3}\n")
    assert load_settings(config).ray.address == "file:6379"
    monkeypatch.setenv("GPUBROKER_RAY__ADDRESS", "environment:6379")
    assert load_settings(config).ray.address == "environment:6379"
    joined = load_settings(config, ray={"address": "flag:6379"}).ray
    assert (joined.address, joined.spares) == ("flag:6379", 3)
    with pytest.raises(SettingsRefused, match=r"head:6379, if it .*\(in --ray\)"):
        load_settings(config, ray={"address": "ray://head:10001"})
    monkeypatch.setenv("GPUBROKER_RAY__ADDRESS", "ray://head:10001")
    with pytest.raises(SettingsRefused, match=r"head:6379, if it .*\(in GPUBROKER_RAY__ADDRESS\)"):
        load_settings(config)


@pytest.mark.parametrize("command", ["serve", "broker"])
def test_the_flag_for_ray_is_the_address_that_is_joined(tmp_path: Path, command: str) -> None:
    """Seen in a refusal that names it, since a start would join."""
    config = a_file(tmp_path, "ray: {dashboard: true}\n")
    app = typer.Typer()
    commands(app)
    refused = CliRunner().invoke(app, [command, "--config", str(config), "--ray", "head:6379"])
    assert refused.exit_code == 2
    assert "dashboard has no effect on the cluster at head:6379" in refused.output


def test_a_flag_that_was_not_given_changes_nothing(tmp_path: Path) -> None:
    assert load_settings(a_file(tmp_path, "port: 1\n"), port=None).port == 1


def test_the_default_priority_is_what_the_name_of_its_band_stands_for(tmp_path: Path) -> None:
    assert load_settings().defaults.priority == 54
    assert load_settings(a_file(tmp_path, "defaults: {priority: critical}\n")).defaults.priority == 95
    server = "{name: a, http_url: 'http://h:1', models: {llm: {priority: background}}}"
    [read] = load_settings(a_file(tmp_path, f"triton: {{servers: [{server}]}}\n")).triton.servers
    assert read.models["llm"].priority == 24


def test_sizes_and_durations_may_have_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUBROKER_RETENTION__FINISHED_SECONDS", "7d")
    text = """
declared_foreign_mb: {n1: 2GiB, L4: 512}
drain_seconds: 1m
limits: {body_bytes: 16MiB, object_bytes: 1000, head_bytes: 16k}
policy: {maximum: {gpu_mb: 40GiB, timeout_seconds: 1h30m}, min_run_seconds: "15"}
simulated_devices: [{memory_mb: 24GiB}]
"""
    found = load_settings(a_file(tmp_path, text))
    assert found.declared_foreign_mb == {"n1": 2048, "L4": 512}
    assert (found.drain_seconds, found.retention.finished_seconds) == (60.0, 7 * 86_400.0)
    assert (found.limits.body_bytes, found.limits.object_bytes) == (16 * 2**20, 1000)
    assert found.limits.head_bytes == 16 * 1024
    assert (found.policy.maximum.gpu_mb, found.policy.maximum.timeout_seconds) == (40 * 1024, 5400.0)
    assert (found.policy.min_run_seconds, found.simulated_devices[0].memory_mb) == (15.0, 24 * 1024)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prot: 1\n", 'prot: there is no such setting; did you mean "port"? (in '),
        ("spares: 1\n", 'did you mean "ray.spares"?'),
        ("banana: 1\n", "known are data_dir, "),
        ("simulated_devices: [{memory: 1}]\n", 'did you mean "memory_mb"?'),
        ("port: -1\n", "port: must be at least 0; found -1 (in "),
        ("defaults: {priority: high}\n", "one of critical, "),
        ("ray: 5\n", "ray: must hold settings by name"),
        ("port: -1\n", "port"),
        ("port: many\n", "port: must be a whole number; found 'many'"),
        ("drain_seconds: soon\n", "a number of seconds or a duration such as 15m or 7d; found 'soon'"),
        ("limits: {body_bytes: big}\n", "a number of bytes or a size such as 16MiB; found 'big'"),
        ("declared_foreign_mb: {n1: lots}\n", "a number of MiB or a size such as 40GiB; found 'lots'"),
        ("ray: {inherit_env: 5}\n", "ray.inherit_env: must be a list; found 5"),
        ("policy: {preemption: perhaps}\n", "policy.preemption: must be true or false; found 'perhaps'"),
        ("log_level: loud\n", "log_level: must be 'DEBUG', 'INFO', 'WARNING' or 'ERROR'; found 'loud'"),
        ("ray: {spares: -1}\n", "ray.spares"),
        ("ray: {sparse: 1}\n", "ray.sparse"),
        ("simulated_devices: [{memory_mb: 0}]\n", "simulated_devices.0.memory_mb"),
        ("entrypoints: [train]\n", "module:function"),
        ("ray: {address: 'ray://head:10001'}\n", "write that of the head itself: head:6379"),
        ("ray: {address: 'ray://h:1/x?y'}\n", "h:6379"),
        ("ray: {address: head}\n", "write host:6379"),
        ("ray: {address: 'http://head:8265'}\n", "is not the address of a Ray head; write host:6379"),
        ("ray: {cluster: lab/a}\n", "ray.cluster: 'lab/a' has a slash"),
        ("ray: {node_name: rack/n1}\n", "ray.node_name: 'rack/n1' has a slash"),
        ("ray: {address: 'h:6379', node_name: n1}\n", "node_name has no effect on the cluster at h:6379"),
        ("ray: {address: 'h:6379', object_store_mb: 500}\n", "set --object-store-memory where `ray start`"),
        ("ray: {address: 'h:6379', object_store_mb: 128}\n", "set --object-store-memory where `ray start`"),
        ("ray: {address: 'h:6379', dashboard: true}\n", "set --include-dashboard where `ray start --head`"),
        ("ray: {token_file: /t}\n", "token_file is for a cluster that is joined, and address is empty"),
        ("ray: {tls: {certificate: /c, key: /k, ca: /a}}\n", "tls is for a cluster that is joined"),
        ("ray: {address: 'h:6379', tls: {certificate: /c}}\n", "ray.tls.key: is required"),
        ("ray: {autoscale: true}\n", "autoscale is for a cluster that is joined"),
        ("kinds: {H100: {pover: 1}}\n", 'did you mean "power"?'),
        ("kinds: {H100: -1}\n", "kinds.H100.power"),
        ("policy: {custom_limits: {fpga: {limit: 1, pre: node}}}\n", 'did you mean "per"?'),
        ("model_types: {llm: {gpu_md: 1}}\n", 'did you mean "gpu_mb"?'),
        (
            "policy: {maximum: {gpu_mb: 40 horses}}\n",
            "a number of MiB or a size such as 40GiB; found '40 horses'",
        ),
        ("policy: {max_running: {labels: {team: 2}}}\n", "key=value or key=*"),
        (
            "policy: {tenants: {vision: {}}, max_running: {tenants: {visoin: 2}}}\n",
            'names "visoin", which policy.tenants does not list; did you mean "vision"?',
        ),
        ("pools: {lab: {gpu: 2}}\n", 'did you mean "gpus"?'),
        (
            "pools: {lab: {custom: {tape: 2}}}\n",
            "names 'tape', which is not in policy.custom_limits",
        ),
        ("policy: {tenants: {acme: {cohort: lab}}}\n", "needs guaranteed_mb"),
        ("policy: {tenants: {acme: {borrow_mb: 1}}}\n", "name the cohort"),
        ("policy: {tenants: {'*': {cohort: lab, guaranteed_mb: 1}}}\n", "no sum in a cohort"),
        ("policy: {tenants: {acme: {wait: 1}}}\n", 'did you mean "weight"?'),
        ("policy: {streams: {nightly: 0}}\n", "policy.streams.nightly"),
        ("fleet: {targets: [{scope: rack}]}\n", "write all, pool:NAME, label:KEY=VALUE or node:NAME"),
        ("fleet: {targets: [{scope: 'label:zone'}]}\n", "write label:KEY=VALUE"),
        ("fleet: {targets: [{scope: 'pool:lab'}]}\n", "names pool 'lab'; pools are none"),
        (
            "fleet: {targets: [{scope: all, min_percent: 90, max_percent: 80}]}\n",
            "90 is not below max_",
        ),
        ("fleet: {watched_directories: [/data, scratch]}\n", "'scratch' is not the path of a directory"),
        ("fleet: {target_util_min_percent: 85}\n", "85 is not below target_util_max_percent 80"),
        ("fleet: {disk: {warn_percent: 66}}\n", "66 is not below clean_percent 65"),
        ("fleet: {disk: {overrides: {rack: {}}}}\n", "write node:NAME or label:KEY=VALUE"),
        ("fleet: {disk: {roots: [{path: logs, class: logs}]}}\n", "write its whole path, and not /"),
        ("fleet: {disk: {roots: [{path: //, class: logs}]}}\n", "write its whole path, and not /"),
        ("fleet: {disk: {roots: [{path: /a, class: redundant}]}}\n", "needs a sync_command, a list"),
        (
            "fleet: {disk: {roots: [{path: /a/, class: logs}, {path: /a/b, class: databases}]}}\n",
            "root /a/b is in root /a",
        ),
        ("fleet: {backpressure: {queue_length: {high: 5, low: 5}}}\n", "low 5 is not below high 5"),
        (
            "fleet: {backpressure: {tenant_queue_length: {high: 400000, low: 5}}}\n",
            "tenant_queue_length.high 400000 is not below queue_length.high 400000",
        ),
        ("submit_from_tasks: true\nray: {address: 'h:6379'}\n", "needs tasks_url with ray.address"),
        ("tasks_url: 'gpubroker.lab'\n", "must begin with http:// or https://"),
        ("drain_notice_seconds: 19\n", "must be at least 2 less than"),
        ("triton: {servers: [{name: a, http_url: 'h:8000'}]}\n", "http://host:8000 or https://host:8000"),
        ("triton: {servers: [{name: a, http_url: 'http://h'}]}\n", "servers.0.http_url: 'http://h' is not"),
        ("triton: {servers: [{name: a b, http_url: 'http://h:1'}]}\n", "triton.servers.0.name"),
        ("triton: {servers: [{name: a, url: 'http://h:1'}]}\n", "triton.servers.0.url: there is no such"),
        ("triton: {servers: [{name: a, http_url: 'http://h:1'}], grpc_port: 8471}\n", "the grpc_url"),
        (
            "triton: {servers: [{name: a, http_url: 'http://h:1'}, {name: a, http_url: 'http://h:2'}]}\n",
            "several servers are named a",
        ),
        (
            "triton: {servers: [{name: a, http_url: 'http://h:1', headers: {'a b': c}}]}\n",
            "be an HTTP header",
        ),
        (
            "triton: {servers: [{name: a, http_url: 'http://h:1', models: {llm: {gpus: 2}}}]}\n",
            "gpus: 2 needs gpu_mb",
        ),
        (
            "triton: {servers: [{name: a, http_url: 'http://h:1', metrics_url: 'h:8002'}]}\n",
            "servers.0.metrics_url: 'h:8002' is not",
        ),
        ("fleet: {idle_grace_seconds: .inf}\n", "fleet.idle_grace_seconds"),
        ("fleet: {gains: {proportional: .inf}}\n", "fleet.gains.proportional"),
        ("policy: {streams: {a: 1.0e+308}}\n", "policy.streams.a"),
        ("- a\n", "settings by name"),
        ("{\n", "not YAML"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(SettingsRefused) as refused:
        load_settings(a_file(tmp_path, text))
    assert named in str(refused.value)


def test_some_variables_have_short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "TARGET_UTIL_MIN": "50", "TARGET_UTIL_MAX": "70", "MAX_DISK_PERCENT": "90", "MEMORY_LIMIT_GB": "12",
        "IDLE_CHECK_INTERVAL": "30", "IDLE_GPU_THRESHOLD": "3", "IDLE_GRACE_PERIOD": "2m",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(f"GPUBROKER_{name}", value)
    found, fleet = load_settings(), load_settings().fleet
    assert (fleet.target_util_min, fleet.target_util_max, fleet.max_disk) == (0.5, 0.7, 0.9)
    assert (fleet.idle_check_seconds, fleet.idle_below, fleet.idle_grace_seconds) == (30, 0.03, 120)
    assert found.ray.process_memory_mb == 12 * 1024
    monkeypatch.setenv("GPUBROKER_FLEET__MAX_DISK_PERCENT", "95")
    assert load_settings().fleet.max_disk == 0.95
    monkeypatch.setenv("GPUBROKER_IDLE_GPU_THRESHOLD", "300")
    with pytest.raises(SettingsRefused, match=r"found '300' \(in GPUBROKER_IDLE_GPU_THRESHOLD\)"):
        load_settings()


def test_targets_of_parts_are_beside_those_of_the_fleet_or_in_their_place() -> None:
    text = {
        "targets": [
            {"scope": "node:n1", "max_percent": 90},
            {"scope": "all", "measure": "disk", "max_percent": 50},
        ]
    }
    rules = fleet_rules_of(load_settings(fleet=text, data_dir=Path("/tmp")))
    shown = {(str(one.scope), one.measure.value): (one.least, one.most) for one in rules.targets}
    assert shown == {
        ("all", "gpu_utilization"): (0.6, 0.8), ("all", "gpu_memory"): (0.0, 0.8),
        ("all", "host_memory"): (0.0, 0.8), ("all", "disk"): (0.0, 0.5),
        ("node:n1", "gpu_utilization"): (0.0, 0.9),
    }  # fmt: skip
    assert rules.thresholds["queue_length"].high == 400_000
    assert rules.overload_thresholds == {
        "cpu": Threshold(0.95, 0.85, Seconds(300.0)), "host_memory": Threshold(0.9, 0.85, Seconds(60.0)),
    }  # fmt: skip
    assert rules.throughput == ThroughputRules()


def test_wrong_setting_names_the_file_the_variable_or_the_flag_it_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = a_file(tmp_path, "device_reserve_mb: 1\n")
    local = a_file(tmp_path, "device_reserve_mb: -1\n", name="config.yaml.local")
    monkeypatch.setenv("GPUBROKER_RAY__SPARES", "many")
    with pytest.raises(SettingsRefused) as refused:
        load_settings(config, log_level="LOUD")
    said = str(refused.value)
    assert f"(in {local})" in said
    assert "found 'many' (in GPUBROKER_RAY__SPARES)" in said
    assert "(in --log-level)" in said


def test_named_file_and_environment_may_not_name_two_data_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("data_dir: /srv/one\n", encoding="utf-8")
    monkeypatch.setenv("GPUBROKER_DATA_DIR", "/srv/two")
    with pytest.raises(SettingsRefused, match="says /srv/one, and GPUBROKER_DATA_DIR says /srv/two"):
        load_settings(config)
    assert load_settings(config, data_dir=Path("/srv/three")).data_dir == Path("/srv/three")
    monkeypatch.setenv("GPUBROKER_DATA_DIR", "/srv/one")
    assert load_settings(config).data_dir == Path("/srv/one")
    monkeypatch.setenv("GPUBROKER_DATA_DIR", "/srv/two")
    monkeypatch.setenv("GPUBROKER_CONFIG", str(config))
    assert load_settings().data_dir == Path("/srv/two")  # both come from the environment


def test_a_variable_that_looks_like_one_of_ours_is_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GPUBROKER_URL", "GPUBROKER_TOKEN", "GPUBROKER_CI_STAGE"):
        monkeypatch.setenv(name, "x")
    load_settings()
    monkeypatch.setenv("GPUBROKER_PRT", "1")
    with pytest.raises(SettingsRefused, match="did you mean GPUBROKER_PORT"):
        load_settings()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsRefused, match=r"nowhere\.yaml"):
        load_settings(tmp_path / "nowhere.yaml")


def test_disk_guard_deletes_nowhere_by_default_and_coordinators_differ() -> None:
    """Coordinators have levels of their own."""
    guard = fleet_rules_of(load_settings(data_dir=Path("/var/gpubroker"))).disk
    assert (guard.roots, guard.warn, guard.clean, guard.block) == ((), 0.6, 0.65, 0.7)
    assert guard.overrides == {"label:role=coordinator": DiskRules(0.4, 0.45, 0.5)}
    assert "/var/gpubroker" in guard.spared
    disk = {
        "old_seconds": "8d",
        "overrides": {"node:n1": {"block_percent": 90}, "label:provider=lab": {"warn_percent": 10}},
        "roots": [{"path": "/scratch/", "class": "redundant", "sync_command": ["sync", "a b"]}],
    }
    guard = fleet_rules_of(load_settings(fleet={"disk": disk})).disk
    assert guard.old_seconds == 8 * 86_400.0
    assert guard.overrides["node:n1"] == DiskRules(0.6, 0.65, 0.9)
    assert list(guard.overrides) == ["label:role=coordinator", "node:n1", "label:provider=lab"]
    assert guard.roots == (WatchedRoot("/scratch", FileClass.REDUNDANT, ("sync", "a b"), 600.0),)


def test_one_tenant_alone_cannot_bring_the_backpressure_of_the_whole_queue() -> None:
    settings = load_settings()
    queue = settings.fleet.backpressure.queue_length
    assert queue is not None
    assert settings.limits.tenant_pending_tasks < queue.low
