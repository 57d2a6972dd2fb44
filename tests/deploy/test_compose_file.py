"""compose.yaml: its form, its settings, and the files that it mounts. No container engine starts it here."""

import json
import re
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
import yaml

from tests.architecture.test_pages import is_verb
from tests.deploy.dockerfile import variables, with_bases
from tests.deploy.programs import DEPLOY, PLACE, ROOT
from tests.deploy.settings_check import settings_from
from tests.deploy.test_image import STAGES, last

ENV = {
    "SITE": "gpus.example.org",
    "POSTGRES_PASSWORD": "a-long-password",
    "RAY_AUTH_TOKEN": "a-long-token",
    "GRAFANA_PASSWORD": "another-password",
    "ENTRYPOINTS": "team.training:*",
    "TRITON_SERVERS": '[{"name":"main","http_url":"http://triton:8000","grpc_url":"http://triton:8001","node":"n1"}]',
}
"""What the operator writes into .env."""


def interpolated(value: Any, env: Mapping[str, str]) -> Any:
    """As Compose does in each text: ${NAME:-default}, ${NAME:?what to do}."""

    def found(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        assert name in env or default is not None, f"{name} is needed: {match[3]}"
        return env.get(name, default or "")

    if isinstance(value, dict):
        return {key: interpolated(one, env) for key, one in value.items()}
    if isinstance(value, list):
        return [interpolated(one, env) for one in value]
    return re.sub(r"\$\{(\w+)(?::-([^}]*)|:\?([^}]*))?\}", found, value) if isinstance(value, str) else value


def compose_file(env: Mapping[str, str] = ENV) -> dict[str, Any]:
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    read: dict[str, Any] = interpolated(yaml.safe_load(text), env)
    return read


SERVICES: Mapping[str, Mapping[str, Any]] = compose_file()["services"]
OURS = [name for name, service in SERVICES.items() if service["image"].startswith("gpubroker")]


def test_it_has_the_form_of_a_compose_file() -> None:
    schema = json.loads((PLACE / "compose.json").read_text(encoding="utf-8"))
    file = compose_file()
    # Two words are newer than the schema that can be had.
    del file["name"]
    for name in OURS:
        for condition in file["services"][name].get("depends_on", {}).values():
            condition.pop("restart", None)
    jsonschema.Draft201909Validator(schema).validate(file)


def test_gateways_and_brokers_share_only_the_database_and_the_objects() -> None:
    assert sorted(OURS) == ["broker-a", "broker-b", "gateway-a", "gateway-b", "ray-head"]
    found = {name: settings_from(variables_of(name)) for name in OURS if name != "ray-head"}
    assert len({settings.data_dir for settings in found.values()}) == 4
    assert len({(settings.blob_dir, settings.database) for settings in found.values()}) == 1
    for name, settings in found.items():
        is_gateway = name.startswith("gateway")
        assert (settings.ray.address == "") is is_gateway
        assert settings.entrypoints == ("team.training:*",)
        assert [server.name for server in settings.triton.servers] == ["main"]
    gateways = [settings for name, settings in found.items() if name.startswith("gateway")]
    assert all({"gpus.example.org", "gateway-a", "gateway-b"} == {*it.allowed_hosts} for it in gateways)
    assert all(it.drain_seconds < 30 for it in found.values()), "stop_grace_period"


def variables_of(name: str) -> dict[str, str]:
    """What the image sets, and what the file adds."""
    image = variables(with_bases(STAGES, SERVICES[name]["build"]["target"]))
    set_there = {key: value for key, value in image.items() if key.startswith("GPUBROKER_")}
    return set_there | {key: str(value) for key, value in SERVICES[name]["environment"].items()}


def test_each_process_has_the_image_that_it_needs_and_its_health_check() -> None:
    for name in OURS:
        service = SERVICES[name]
        target = "gateway" if name.startswith("gateway") else "server"
        assert service["build"] == {"context": "..", "target": target}
        assert service["image"].partition(":")[0] == (
            "gpubroker-gateway" if target == "gateway" else "gpubroker"
        )
        assert "init" not in service, "the image brings its own"
        check = service.get("healthcheck", {"test": ["CMD", *last(target, "HEALTHCHECK").command]})["test"]
        assert check == ["CMD", "gpubroker", "health", *(["node"] if name == "ray-head" else [])]
        assert service.get("read_only", False) is (name != "ray-head")
    assert SERVICES["ray-head"]["entrypoint"][:4] == [*last("server", "ENTRYPOINT").command[:3], "ray"]


@pytest.mark.parametrize("name", ["SITE", "POSTGRES_PASSWORD", "RAY_AUTH_TOKEN", "GRAFANA_PASSWORD"])
def test_what_has_no_default_is_asked_for(name: str) -> None:
    with pytest.raises(AssertionError, match=f"{name} is needed: write it into .env"):
        compose_file({key: value for key, value in ENV.items() if key != name})


def test_without_triton_and_entrypoints_there_are_none() -> None:
    needed = {name: value for name, value in ENV.items() if name not in ("TRITON_SERVERS", "ENTRYPOINTS")}
    services = compose_file(needed)["services"]
    settings = settings_from({key: str(value) for key, value in services["gateway-a"]["environment"].items()})
    assert (settings.triton.servers, settings.entrypoints) == ((), ())
    assert services["triton"]["profiles"] == ["triton"]


def test_mounted_files_are_there() -> None:
    files = [
        volume.partition(":")[0]
        for service in SERVICES.values()
        for volume in service.get("volumes", ())
        if volume.startswith("./") and volume.partition(":")[0] not in ("./code", "./models")
    ]
    assert [file for file in files if not (DEPLOY / file).exists()] == []
    assert len(files) >= 6


def test_a_new_volume_belongs_to_the_user_of_the_process() -> None:
    """Docker gives it to the owner of the image's directory, else to root."""
    [made] = [one.words for one in STAGES["base"].own if one.name == "RUN"]
    [owned] = re.findall(r"install --directory --owner gpubroker [^&]* --mode \d+ ([^&]+) &&", made)
    places = {
        place
        for name in OURS
        for source, _, place in (volume.partition(":") for volume in SERVICES[name]["volumes"])
        if source in compose_file()["volumes"]
    }
    assert places == {*owned.split()}


def test_commands_and_dependencies_exist() -> None:
    assert [name for name in OURS if not is_verb(SERVICES[name]["command"])] == []
    for service in SERVICES.values():
        for needed in service.get("depends_on", {}):
            assert needed in SERVICES
            assert "healthcheck" in SERVICES[needed] or needed in OURS


def test_prometheus_scrapes_each_gateway_by_a_name_that_it_answers_to() -> None:
    [group] = yaml.safe_load((DEPLOY / "compose/targets.yaml").read_text(encoding="utf-8"))
    assert group["targets"] == [f"{name}:8470" for name in OURS if name.startswith("gateway")]
    assert SERVICES["proxy"]["environment"]["GATEWAYS"].split() == group["targets"]


@pytest.mark.parametrize(
    "starts_ray",
    [
        "deploy/compose.yaml",
        "deploy/kuberay/raycluster.yaml",
        "deploy/slurm/gpubroker-node.sbatch",
        "deploy/systemd/gpubroker-node.service",
        "docs/how-to/run-on-several-machines.md",
    ],
)
def test_where_a_node_of_ray_starts_its_agent_keeps_its_priority(starts_ray: str) -> None:
    """Else a node that joins a busy machine takes twice as long to be of use, and its heartbeats are late."""
    text = (ROOT / starts_ray).read_text(encoding="utf-8")
    assert re.search(r'RAY_worker_niceness(=|: "|, value: ")0', text)
